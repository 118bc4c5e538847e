"""kvferryd, which says what it holds when asked over a pipe.

python -m tests.support.faults.node_program FD FLAGS...
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection

from kvferry_server.node.main import run
from tests.support.faults.reports import die_with_parent, held


def main(descriptor: int, flags: list[str]) -> int:
    die_with_parent()
    pipe = Connection(descriptor)

    def answer() -> None:
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send(held())

    threading.Thread(target=answer, daemon=True).start()
    return run(flags)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
