"""docs/performance.md and RESULTS.md are what the committed results make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goals import GOALS, Goal
from benchmarks.pages import HUGE, SMALL
from benchmarks.remarks import REMARKS
from benchmarks.report import PERFORMANCE, TABLES, pages, performance, reasons, tables
from benchmarks.results import RESULTS, Results, Summary
from benchmarks.topics import TOPICS
from benchmarks.vllm_concurrent_goals import PARTS, STEP
from benchmarks.vllm_concurrent_goals import row as concurrent_row
from benchmarks.vllm_goals import OURS, THEIRS, row
from benchmarks.vllm_prefix_goals import COMPUTED, FETCHED, OWN
from benchmarks.vllm_prefix_goals import row as prefix_row
from benchmarks.vllm_prefix_goals import verdict as prefix_verdict


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.parse(RESULTS.read_text())


def test_the_documents_are_current(results: Results) -> None:
    assert performance(results) == PERFORMANCE.read_text(), "run: python -m benchmarks.report"
    assert tables(results) == TABLES.read_text(), "run: python -m benchmarks.report"


def test_documents_have_no_placeholders_left(results: Results) -> None:
    assert "{{" not in performance(results)


def test_the_results_have_every_topic_and_survive_being_written(results: Results) -> None:
    assert set(results.topics) == set(TOPICS)
    assert Results.parse(results.dump()) == results


def test_missed_goals_are_all_explained(results: Results) -> None:
    """Whatever a run finds: each goal has its remark."""
    assert set(REMARKS) == {goal.key for goal in GOALS} | {"vllm", "vllm concurrent", "vllm prefix"}
    for goal in GOALS:
        assert (f"({goal.found(results)})" in reasons(results)) or goal.met(results)


@pytest.mark.parametrize(
    ("value", "at_most", "met", "missed"),
    [
        (4.0, True, True, ""),
        (4.004, True, True, ""),
        (5.0, True, False, "1.25 ×"),
        (4.0, False, True, ""),
        (2.0, False, False, "2.00 ×"),
    ],
)
def test_a_goal_is_judged_by_the_number_that_is_shown(
    results: Results, value: float, at_most: bool, met: bool, missed: str
) -> None:
    goal = Goal("read", "a read", "an echo", 4, at_most, lambda _: value)
    assert (goal.met(results), goal.missed_by(results)) == (met, missed)


def test_the_line_of_vllm_has_the_best_and_the_worst_request() -> None:
    samples = {
        "TP 1 to 1, first request, 64 tokens": {THEIRS: [2.0], OURS: [1.0]},
        "TP 1 to 1, 64 tokens": {THEIRS: [1.0, 2.0, 3.0], OURS: [0.5, 1.0, 9.0]},
        "TP 2 to 1, 64 tokens": {THEIRS: [1.0, 1.0, 1.0], OURS: [1.5, 2.0, 2.0]},
    }
    *_, found, missed = row(samples)
    assert found == "median 0.50 to 2.00, fastest 0.50 to 1.50, first 0.50 to 0.50"
    assert missed == "median 2.50 ×, fastest 1.50 ×"


def test_the_line_of_both_asked_at_once_says_what_is_left_without_vllms_own_step() -> None:
    samples = {
        PARTS: {1: [2.0, 2.0, 9.0], 2: [2.4], 4: [1.8, 3.0, 3.0]},
        # Of each request: what was measured after it.
        STEP: {1: [0.9, 1.0, 8.0], 2: [1.1], 4: [0.8, 1.0, 2.9]},
    }
    *_, found, missed = concurrent_row(samples)
    assert (found, missed) == ("1.50, without vLLM's own step 1.30", "1.15 ×")


def test_the_line_of_fetched_prefixes_has_the_medians_in_the_computed_one() -> None:
    samples = {COMPUTED: [1.0, 2.0, 9.0], FETCHED: [0.1, 1.2, 1.3], OWN: [0.1, 0.5, 3.0]}
    *_, found, missed = prefix_row(samples)
    assert (found, missed) == ("0.60, with the prefix in its own cache 0.25", "1.20 ×")
    *_, missed = prefix_row({**samples, FETCHED: [0.1, 1.0, 1.3]})
    assert missed == ""
    assert prefix_verdict(samples) == "Goal: fetched takes at most 0.5 of computed. Measured: 0.60; missed by 1.20 ×."


def test_worst_cell_decides_a_goal(results: Results) -> None:
    topic = results.topics["paths"]
    cell = next(found for name, found in topic.measures.items() if name.startswith("chosen, "))
    slow: Summary = replace(cell, median=100 * topic.measures[cell.against].median)
    worse = results.with_topics({"paths": replace(topic, measures={**topic.measures, cell.name: slow})})
    [goal] = [goal for goal in GOALS if goal.key == "choice"]
    assert goal.value(worse) == pytest.approx(100)


def test_report_mentions_a_busy_machine_and_several_revisions(results: Results) -> None:
    quiet = replace(
        results, topics={name: replace(topic, load=(1.0, 1.5), revision="a") for name, topic in results.topics.items()}
    )
    assert "not idle" not in performance(quiet)
    assert "one revision" not in performance(quiet)
    topic = quiet.topics["paths"]
    assert "not idle" in performance(quiet.with_topics({"paths": replace(topic, load=(50.0, 50.0))}))
    assert "one revision" in performance(quiet.with_topics({"paths": replace(topic, revision="b")}))


def test_spreads_that_overlap_decide_nothing(results: Results) -> None:
    topic = results.topics["pages"]

    def with_huge(p10: float, p90: float) -> str:
        faster = replace(topic.measures[HUGE], p10=p10, median=p10, p90=p90)
        return pages(results.with_topics({"pages": replace(topic, measures={**topic.measures, HUGE: faster})}))

    slow = topic.measures[SMALL]
    assert "does not decide" in with_huge(slow.p10 / 2, slow.p10)
    assert "does not decide" not in with_huge(slow.p10 / 4, slow.p10 / 2)
