"""The page in a real browser: its content, and that names from strangers have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from kvferry._wire.channel import connect
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.admin.page import Html, each, html
from tests.server.admin.browser import browser
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import get
from tests.support.node_servers import Kvferryd
from tests.support.raw_parties import Party
from tests.support.waiting import until

EVIL = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A node server with an engine and a request that have malicious names."""
    path = tmp_path_factory.mktemp("page") / "node.sock"
    with ExitStack() as stack:
        flags = ["--unix", str(path), "--listen", "", "--admin", "127.0.0.1:0", "--drain", "0"]
        # Longer than a browser takes to start: an expired lease would be one more ended read.
        flags += ["--ttl", "600", "--max-ttl", "600"]
        server = stack.enter_context(Kvferryd(*flags, "--log-level", "debug"))
        party = Party(stack.enter_context(connect(server.address)), EVIL)
        stack.callback(party.close)
        party.works()
        publish = party.publish_notification(party.publication + 1)
        publish.publish.request_id = EVIL
        party._notify(publish)
        party.publication += 1
        done = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE, bytes=7)
        party.notify_reader(pb.Notification(read_done=pb.ReadDone(lease_id=party.read(), reports=[done])))
        yield Watched(server, party)


COLOUR_OF_BAD = """(() => {
  document.body.insertAdjacentHTML("beforeend", "<b class='bad'></b>");
  return getComputedStyle(document.querySelector(".bad")).color.match(/[0-9]+/g).map(Number);
})()"""
UPDATED = """new Promise(resolve => setInterval(() => {
  if (document.querySelector("#updated").textContent) resolve(document.documentElement.outerHTML);
}, 10))"""
"""The page, after its script has reloaded it."""


@pytest.mark.slow
async def test_page_shows_engines_reads_and_requests_and_stays_live(named: Watched, tmp_path: Path) -> None:
    async with browser(tmp_path) as tab:
        await tab.open(f"http://{named.admin}/", width=1200)
        page = await tab.computed(UPDATED)
        assert tab.complaints == []
    assert "<title>kvferry: " in page
    assert "pwned" not in unescape(re.findall(r"<title>(.*?)</title>", page)[0])
    # As text, not as elements.
    assert page.count("<script") == 1
    assert "<img" not in page
    for name in ("engines", "reads", "requests"):
        found = re.search(rf'<table id="{name}">.*?</table>', page, re.DOTALL)
        assert found is not None, name
        assert EVIL in unescape(re.sub(r"<[^>]+>", "", found[0])), name
    # Two reads have ended, each with a bar.
    timeline = re.search(r'<ol class="timeline".*?</ol>', page, re.DOTALL)
    assert timeline is not None
    assert timeline[0].count("<rect") == 2
    assert timeline[0].count(" 7 bytes") == 2


class Halved(Party):
    """An engine of two ranks of which one registers."""

    def registration(self) -> pb.RegisterCacheRequest:
        request = super().registration()
        request.num_ranks = 2
        return request

    def read(self) -> bytes:
        # It cannot be read from.
        return b""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A node server with an engine that works, one that lacks a rank, one that is dead, and a read that failed. Names
    are as long as they may be, and have no place for a line to break."""
    path = tmp_path_factory.mktemp("page") / "node.sock"
    with ExitStack() as stack:
        flags = ["--unix", str(path), "--listen", "", "--admin", "127.0.0.1:0", "--drain", "0"]
        flags += ["--ttl", "600", "--max-ttl", "600", "--engine-ttl", "1"]
        server = stack.enter_context(Kvferryd(*flags))
        channel = stack.enter_context(connect(server.address))
        good, halved, dead = Party(channel, "w" * 230), Halved(channel, "z-halved"), Party(channel, "z-dead")
        stack.callback(good.close)
        stack.callback(halved.close)
        good.works()
        good.publish()
        failed = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_FAILED, reason=errors_pb2.TRANSFER_STUCK)
        good.notify_reader(pb.Notification(read_done=pb.ReadDone(lease_id=good.read(), reports=[failed])))
        halved.live()
        dead.works()
        dead.close()
        until(lambda: ">dead<" in get(server.admin, "/").text.partition("</section>")[0])
        yield Watched(server, good)


SHOWN = """(() => {
  const seen = [...document.querySelectorAll("body *")].filter(one => one.getClientRects().length);
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const behind = one => {
    const found = numbers(getComputedStyle(one).backgroundColor);
    return found.length === 3 || found[3] > 0 ? found : behind(one.parentElement);
  };
  const text = one => [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const name = one => `${one.tagName} ${one.getAttribute("class") || ""} ${one.textContent.slice(0, 40)}`;
  const texts = seen.filter(one => text(one) && one.tagName !== "OPTION" && one.tagName !== "title").map(one => {
    const style = getComputedStyle(one);
    return [name(one), numbers(one.closest("svg") ? style.fill : style.color), behind(one),
            one.closest("svg") ? one.getBoundingClientRect().height : parseFloat(style.fontSize)];
  });
  const names = seen.filter(one => one.tagName === "TD").map(one =>
    [name(one), numbers(getComputedStyle(one, "::before").color), behind(one), 14]);
  return {
    width: document.documentElement.scrollWidth,
    beyond: seen.filter(one => !one.closest("svg") && one.getBoundingClientRect().right > innerWidth).map(name),
    texts: [...texts, ...names],
    tops: ["#problems", "#engines", "#requests", "#reads", ".timeline"].map(one =>
      document.querySelector(one).getBoundingClientRect().top),
    problems: [...document.querySelectorAll("#problems li")].map(one => [
      one.className, one.textContent, numbers(getComputedStyle(one).borderLeftColor)]),
    states: Object.fromEntries(seen.filter(one => one.tagName === "TD" && one.className).map(one =>
      [one.className, numbers(getComputedStyle(one).color)])),
    bars: [...document.querySelectorAll(".timeline rect")].map(one => one.getBoundingClientRect().width),
  };
})()"""
"""What a browser has made of the first page. Sizes are in CSS pixels, colours in 0 to 255."""


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast of two colours, as WCAG defines it; 4.5 is enough for text."""

    def luminance(colour: list[float]) -> float:
        parts = [each / 255 for each in colour[:3]]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 700, 1200])
async def test_page_can_be_read_on_each_screen(troubled: Watched, tmp_path: Path, width: int, dark: bool) -> None:
    async with browser(tmp_path) as tab:
        await tab.open(f"http://{troubled.admin}/", width=width, dark=dark)
        shown = await tab.computed(SHOWN)
        picture = await tab.picture()
    assert tab.complaints == []
    # Nobody has to move the page sideways, or to guess at letters.
    assert shown["beyond"] == []
    assert shown["width"] <= width
    assert len(shown["texts"]) > 50
    assert [text for text in shown["texts"] if contrast(text[1], text[2]) < 4.5 or text[3] < 11] == []
    assert min(shown["bars"]) >= 0
    # What is wrong comes first, the worst above all, then requests, and bars last.
    assert shown["tops"] == sorted(shown["tops"])
    kinds = [kind for kind, _, _ in shown["problems"]]
    assert kinds == ["dead", "incomplete", "failed"]
    _, incomplete, failed = (text for _, text, _ in shown["problems"])
    assert "1 of 2 ranks are missing; not registered: rank 1" in incomplete
    assert "TRANSFER_STUCK" in failed
    assert all("Next: " in text for _, text, _ in shown["problems"])
    # Its colours are in the table, too, and in the picture, whose page is as dark as it should be.
    red, orange, _ = (colour for _, _, colour in shown["problems"])
    assert red[0] > red[1] + 50 < red[2] + 100
    assert orange[0] > orange[1] > orange[2]
    assert (shown["states"]["failed"], shown["states"]["incomplete"]) == (red, orange)
    assert (picture == red).all(axis=2).sum() > 100
    assert (picture == orange).all(axis=2).sum() > 100
    assert (np.median(picture) < 64) == dark


@pytest.mark.slow
async def test_page_without_a_problem_is_calm(named: Watched, tmp_path: Path) -> None:
    until(lambda: "No problem is known" in get(named.admin, "/").text)
    async with browser(tmp_path) as tab:
        await tab.open(f"http://{named.admin}/", width=400)
        colour = await tab.computed(COLOUR_OF_BAD)
        picture = await tab.picture()
    assert not (picture == colour).all(axis=2).any()


def test_first_page_says_while_the_node_server_waits_for_its_engines(tmp_path: Path) -> None:
    flags = ["--unix", f"{tmp_path}/node.sock", "--listen", "", "--admin", "127.0.0.1:0", "--drain", "0"]
    said = "waits for engines"
    with Kvferryd(*flags, "--engine-ttl", "600") as server:
        assert said in get(server.admin, "/").text
    with Kvferryd(*flags, "--engine-ttl", "0.01") as server:
        until(lambda: said not in get(server.admin, "/").text)


def test_templates_escape_values_that_are_not_html() -> None:
    evil = '"><script>{0.__class__}'
    escaped = "&quot;&gt;&lt;script&gt;{0.__class__}"
    assert html('<p title="{}">{name}</p>', evil, name=evil) == f'<p title="{escaped}">{escaped}</p>'
    assert html("<p>{}{:.1f}</p>", Html("<b>x</b>"), 1.25) == "<p><b>x</b>1.2</p>"
    assert each("<b>{0}{0}</b>", [1, "<"]) == "<b>11</b><b>&lt;&lt;</b>"
