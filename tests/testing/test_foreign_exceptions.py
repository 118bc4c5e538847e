"""What a caller gives to kvferry may raise anything: callbacks, futures, watches, hooks, handlers of loggers. It ends
no thread and no coroutine of kvferry's, so that whatever comes later is done."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import Blocks, Directory, EngineSpec, Group, IntegrityOptions, Listed, Prompt, _tracing, open_directory
from kvferry._control.publication_sender import PublicationSender
from kvferry._control.renewals import Renewals
from kvferry._control.watcher import Watcher
from kvferry._directory.opening import FileDirectory
from kvferry._threads import guarded
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import TransferCancelled, TransferFailed, WrongState
from kvferry.testing import Fabric
from tests.support.repository import syntax
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON

AXES = ("kv", "block", "head", "token", "content")
CLIENT = Path(kvferry.__file__).parent
RAISED = [ValueError, asyncio.CancelledError, SystemExit]
Raised = type[BaseException]

REPEATED: dict[str, type[Any]] = {
    "_control/publication_sender.py": PublicationSender,
    "_control/renewals.py": Renewals,
    "_control/watcher.py": Watcher,
}
"""Every coroutine that takes turns, by its file."""

STARTED = {
    "aio.py": "closes what a cancelled caller does not get, once",
    "_directory/directory.py": "catches everything itself: a look at the directory, again and again",
    "_loop.py": "the loop, which begins again when something has stopped it; work that takes long; ends a future, "
    "whose callbacks belong to the application",
    "_control/connection.py": "reads a stream; tests whether the system has threads",
    "_reads/cache_reads.py": "a callback of a read, once",
}
"""Where a thread is started."""

OWN = {
    "_threads.py": "the place where threads are started",
    "_embed.py": "the event loop of an embedded node server",
    "_transport/reading_thread.py": "catches everything itself: its agent must not end while it reads",
    "_cli/node.py": "a program's own pool",
    "_cli/top.py": "a program's own pool",
    "integrations/sglang/bootstrap.py": "an HTTP server of Python's, which catches its requests' errors; one request; "
    "a pool whose futures keep errors; a timer",
    "integrations/vllm/worker.py": "announces memory once",
}
"""Where a thread is made in another way."""


def calls_of(*names: str) -> set[str]:
    """The files of the client that call one of these."""
    found = set[str]()
    for file in CLIENT.rglob("*.py"):
        for node in ast.walk(syntax(file)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in names:
                    found.add(str(file.relative_to(CLIENT)))
    return found


def test_every_thread_and_coroutine_that_goes_on_is_listed_here() -> None:
    """A thread that is new stands in one of the tables above, and what goes on is tested below."""
    assert calls_of("spawn_turns") == set(REPEATED)
    assert calls_of("start_thread") == set(STARTED)
    assert calls_of("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread") == set(OWN)


@pytest.fixture
def raising_handler() -> Iterator[None]:
    """A handler of the application's that raises what is no `Exception` for each error that is logged."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit(1)

    handler = Handler(logging.ERROR)
    logging.getLogger("kvferry").addHandler(handler)
    yield
    logging.getLogger("kvferry").removeHandler(handler)


class Pair:
    """Two engines on a fabric whose every thread works: publications, checksums, renewals, reads."""

    def __init__(self, fabric: Fabric) -> None:
        integrity = IntegrityOptions("full", patience=SOON)
        source, reader = fabric.client(integrity=integrity), fabric.client(integrity=integrity)
        spec = EngineSpec("p", (Group("full", block_tokens=16, num_blocks=64),))
        self.source = SchedulerPort(source, spec)
        self.memory, self.mine = np.zeros((2, 64, 1, 16, 4), np.float32), np.zeros((2, 64, 1, 16, 4), np.float32)
        self.worker = WorkerPort(source, spec)
        self.sums = self.worker.register({"layer": self.memory}, axes=AXES)
        other = EngineSpec("d", (Group("full", block_tokens=16, num_blocks=64),))
        self.cache = reader.register_cache(other, tensors={"layer": self.mine}, axes=AXES)
        self.reader, self.held, self.block = reader, fabric, 0

    def serve(self) -> None:
        """Publish, sum, read, compare and release a block."""
        self.block += 1
        self.memory[:, self.block] = self.block
        blocks = {"full": Blocks([self.block])}
        publication = self.source.publish(f"request {self.block}", blocks, checksums=True)
        assert self.sums.checksum(publication.number, blocks).result(SOON) > 0
        result = self.cache.read(publication.reference, blocks, timeout=SOON).result(SOON)
        assert result.verification is not None
        assert (result.verification.unverified, result.confirmed) == (0, True)
        assert np.all(self.mine[:, self.block] == self.block)
        until(lambda: any(release.publication == publication.number for release in self.source.released()))


@pytest.mark.parametrize("raised", [ValueError, SystemExit])
@pytest.mark.parametrize("repeated", [PublicationSender, Watcher])
def test_an_engine_goes_on_after_any_exception_of_a_turn(
    repeated: type[Any], raised: Raised, monkeypatch: pytest.MonkeyPatch, raising_handler: None
) -> None:
    """Renewals are tested in tests/control/test_renewal_decisions.py."""
    turn, failed = repeated._turn, set[int]()

    async def turns(self: Any) -> bool:
        if id(self) not in failed:
            failed.add(id(self))
            raise raised("a turn")
        more: bool = await turn(self)
        return more

    monkeypatch.setattr(repeated, "_turn", turns)
    with Fabric() as fabric:
        pair = Pair(fabric)
        pair.serve()
        pair.serve()
    assert failed


@pytest.mark.parametrize("raised", RAISED)
def test_a_directory_is_followed_after_any_exception_of_a_look(
    raised: Raised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raising_handler: None
) -> None:
    look, failed = FileDirectory._follow, list[FileDirectory]()

    def follow(self: FileDirectory) -> float:
        if len(failed) < 2:
            failed.append(self)
            raise raised("a look")
        return look(self)

    monkeypatch.setattr(FileDirectory, "_follow", follow)
    file = tmp_path / "directory.toml"
    file.write_text('homes = ["10.0.0.7:7423"]\n')
    with open_directory(f"file:{file}") as directory:
        assert directory.wait(SOON)
    assert len(failed) == 2


@pytest.mark.parametrize("raised", RAISED)
def test_later_checksums_follow_any_exception_of_a_future(raised: Raised, raising_handler: None) -> None:
    def fail(_: object) -> None:
        raise raised("a future")

    with Fabric() as fabric:
        pair = Pair(fabric)
        blocks = {"full": Blocks([60])}
        publication = pair.source.publish("first", blocks, checksums=True)
        # Not done before it has its callback.
        fabric.stop_home()
        future = pair.sums.checksum(publication.number, blocks, timeout=SOON)
        future.add_done_callback(fail)
        fabric.start_home()
        future.result(SOON)
        pair.serve()


def test_a_cache_may_be_closed_by_a_callback_of_its_checksums() -> None:
    closed = threading.Event()

    def close(_: object) -> None:
        pair.sums.close()
        closed.set()

    with Fabric() as fabric:
        pair = Pair(fabric)
        blocks = {"full": Blocks([60])}
        publication = pair.source.publish("first", blocks, checksums=True)
        # Not done before it has its callback.
        fabric.stop_home()
        pair.sums.checksum(publication.number, blocks, timeout=SOON).add_done_callback(close)
        fabric.start_home()
        assert closed.wait(SOON)


@pytest.mark.parametrize("raised", RAISED)
def test_later_directory_updates_follow_any_exception_of_a_watch(
    raised: Raised, tmp_path: Path, raising_handler: None
) -> None:
    file = tmp_path / "directory.toml"
    directory: Directory = open_directory(f"file:{file}")
    told: list[Listed] = []

    def fail(_: Listed) -> None:
        raise raised("a watch")

    with directory:
        directory.watch(fail)
        directory.watch(told.append)
        for count in (1, 2, 3):
            fresh = file.with_suffix(".new")
            fresh.write_text("homes = [" + ", ".join(f'"10.0.0.{index}:7611"' for index in range(count)) + "]\n")
            fresh.replace(file)
            until(lambda: bool(told) and len(told[-1].homes) == count)  # noqa: B023


@pytest.mark.parametrize("raised", [ValueError, asyncio.CancelledError])
def test_reads_go_on_after_any_exception_of_a_trace_hook(raised: Raised, raising_handler: None) -> None:
    def start(*_: object) -> _tracing.Span:
        raise raised("a hook")

    _tracing.use(start)
    try:
        with Fabric() as fabric:
            pair = Pair(fabric)
            pair.serve()
            pair.serve()
    finally:
        _tracing.use(None)


@pytest.mark.parametrize("raised", RAISED)
def test_reads_end_and_leases_are_renewed_whatever_a_handler_of_each_record_raises(raised: Raised) -> None:
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is not threading.main_thread():
                records.append(record)
                raise raised("a handler")

    handler, logger = Handler(), logging.getLogger("kvferry")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with Fabric() as fabric:
            pair = Pair(fabric)
            pair.serve()
            publication = pair.source.publish("several", {"full": Blocks([60])}, expected_reads=9)

            def begin(block: int) -> kvferry.Read:
                return pair.cache.read(publication.reference, {"full": Blocks([block])}, timeout=600.0)

            with fabric.hold_reads():
                read, renewed = begin(61), begin(62)
                until(lambda: read.progress().total > 0 and renewed.progress().total > 0)
                read.cancel()
                # Its lease is lost with the home, and acquired again; then time passes, and it is renewed.
                fabric.stop_home()
                fabric.start_home()
                fabric.advance(90.0)
            assert isinstance(read.exception(SOON), TransferCancelled)
            assert renewed.result(SOON).confirmed
            fabric.fail_reads()
            failed = begin(63)
            assert isinstance(failed.exception(SOON), TransferFailed)
            assert failed.wait_quiet(SOON)
            pair.source.abort(publication)
            until(lambda: any(release.publication == publication.number for release in pair.source.released()))
            refused = pair.cache.read(publication.reference, {"full": Blocks([61])}, timeout=1.0)
            assert refused.exception(SOON) is not None
            pair.serve()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert {record.levelno for record in records} >= {logging.DEBUG, logging.INFO, logging.WARNING}
    # Each names the line that has logged it.
    assert "_logs" not in {record.module for record in records}


def test_handlers_and_hooks_may_ask_for_stats_of_each_record_and_span() -> None:
    """Also while what they ask about is changing: in the middle of a publish, a read's end, or a release."""
    asked, records = list[Callable[[], object]](), set[tuple[str, int]]()

    def ask() -> None:
        for each in asked:
            each()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.add((record.module, record.levelno))
            ask()

    class Span(_tracing.Span):
        def end(self, *_: object, **__: object) -> None:
            ask()

    def work() -> None:
        with Fabric(hold=1.0) as fabric:
            pair = Pair(fabric)
            spec = EngineSpec("e", (Group("full", block_tokens=16, num_blocks=64),))
            asked.extend([pair.reader.stats, pair.source.stats, SchedulerPort(pair.reader, spec).stats])
            asked.append(pair.source._session.unreleased)
            pair.serve()
            publication = pair.source.publish("fails", {"full": Blocks([60])}, checksums=True)
            fabric.fail_reads()
            failed = pair.cache.read(publication.reference, {"full": Blocks([60])}, timeout=SOON)
            assert isinstance(failed.exception(SOON), TransferFailed)
            until(lambda: bool(pair.source.released()))
        ended.set()

    ended, handler, logger = threading.Event(), Handler(), logging.getLogger("kvferry")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    _tracing.use(lambda *_: Span("00-" + "1" * 32 + "-" + "2" * 16 + "-01"))
    try:
        # On a thread of its own, which would wait for itself for ever.
        threading.Thread(target=work, daemon=True).start()
        assert ended.wait(SOON)
    finally:
        _tracing.use(None)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert records >= {
        (name, level) for name in ("publications", "leased_read") for level in (logging.DEBUG, logging.INFO)
    }


def test_a_call_that_waits_is_refused_on_the_loop_and_works_elsewhere_later() -> None:
    """A wait there would stop the leases of all reads, and a read would wait for itself."""
    group, memory = Group("full", block_tokens=4, num_blocks=8), np.zeros((2, 8, 1, 4, 4), np.float32)
    with Fabric() as fabric:
        client, other = fabric.client(), fabric.client()
        port = SchedulerPort(client, EngineSpec("asked", (group,)))
        cache = WorkerPort(client, port.spec).register({"layer": memory}, axes=AXES)
        asker = other.register_cache(EngineSpec("asker", (group,)), tensors={"layer": memory}, axes=AXES)
        session = client.open_engine(EngineSpec("third", (group,)))
        unfinished = asker.session.publish("request", {"full": Blocks([1])}, last=False)
        read = cache.read(unfinished.reference, {"full": Blocks([2])})
        waits: dict[str, Callable[[], object]] = {
            "result": read.result,
            "quiet": read.wait_quiet,
            "news": lambda: port.wait_news(SOON),
            "released": lambda: session.released(SOON),
            "publish": lambda: session.publish("mine", {"full": Blocks([3])}),
            "cache": cache.close,
            "port": port.close,
            "session": session.close,
            "client": client.close,
        }
        refused: list[str] = []
        heard = threading.Event()

        def wait() -> None:
            for name, call in waits.items():
                with pytest.raises(WrongState, match="kvferry's own loop"):
                    call()
                refused.append(name)
            heard.set()

        port.on_question(wait)
        asker.fetch(cache.engine_reference, Prompt(range(16)), {"full": Blocks([3])})
        assert heard.wait(SOON)
        assert refused == list(waits)
        assert session.unreleased() == ()
        # Nothing was closed.
        read_again = cache.read(unfinished.reference, {"full": Blocks([4])})
        port.acquire("request", unfinished.reference)
        client.close()
        assert isinstance(read_again.exception(SOON), TransferCancelled)
        assert isinstance(read.exception(SOON), TransferCancelled)
        with fabric.client() as next_start:
            # Each has ended its incarnation.
            for spec in (port.spec, session.spec):
                next_start.open_engine(spec, timeout=5.0)


def test_only_logs_talk_to_handlers() -> None:
    """What runs an application's handlers in the middle of its own work goes through `kvferry._logs`."""
    found = {file for file in calls_of("getLogger") if not file.startswith("integrations/")}
    assert found == {"_logs.py"}


def test_the_main_thread_keeps_its_interrupts() -> None:
    for raised in (KeyboardInterrupt, SystemExit):

        def interrupt(raised: Raised = raised) -> None:
            raise raised

        with pytest.raises(raised):
            guarded(interrupt, "a test")
    assert guarded(lambda: None, "a test") is True
