"""Run the benchmarks: `python -m benchmarks` all of them, `python -m benchmarks TOPIC …` some.

Each topic runs in a process of its own. Its results replace those in results.json, from which `make bench` writes
docs/performance.md and RESULTS.md.
"""

from __future__ import annotations

import argparse

from benchmarks.measures import FULL, SMOKE
from benchmarks.results import RESULTS, Results, machine
from benchmarks.topics import TOPICS, measured, missing


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}; none: all")
    parser.add_argument("--smoke", action="store_true", help="only whether they run; writes nothing")
    given = parser.parse_args()
    unknown = sorted(set(given.topics) - set(TOPICS))
    if unknown:
        parser.error(f"no such topics: {', '.join(unknown)}")
    for name in given.topics or TOPICS:
        if why := missing(name):
            print(f"{name}: left out, {why}\n", flush=True)
            continue
        found = measured(name, SMOKE if given.smoke else FULL)
        print(f"{found.table().markdown()}\n{name}: {found.took} s, load {found.load}\n", flush=True)
        if not given.smoke:
            known = Results.parse(RESULTS.read_text()) if RESULTS.exists() else Results(machine(), {})
            RESULTS.write_text(known.with_topics({name: found}).dump())


if __name__ == "__main__":
    main()
