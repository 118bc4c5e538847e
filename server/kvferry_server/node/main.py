"""The command `kvferryd`: runs one node server until a signal stops it.

SIGTERM and SIGINT drain it; a second one stops it at once. SIGHUP reads the policy and the TLS files again.
Exit codes: 0 after a drain, 1 if it could not start or failed, 2 for wrong settings.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import kvferry
from kvferry.errors import InternalError, InvalidInput, KvferryError

if TYPE_CHECKING:
    from kvferry_server.node.loading import Loaded
    from kvferry_server.node.logs import NativeLog

DESCRIPTION = """\
The node server of kvferry: one per node. Engines of this host register their caches and publish their requests here,
and engines of other hosts ask it for what is published here.

  kvferryd                                          try it on this host
  kvferryd --listen 0.0.0.0:7423 --advertise $POD_IP \\
           --tls-cert node.pem --tls-key node.key --tls-ca fleet-ca.pem
                                                    run one per node of a cluster
"""

EPILOG = """\
Every setting can also be set in the environment (its name is in brackets, after the default) or in a TOML file.
Flags win over the environment, which wins over the file. Durations are in seconds.

See what a running server holds with: kvferry engines --server unix:/run/kvferry/node.sock
"""

logger = logging.getLogger("kvferryd")


def main() -> None:
    """Run the command with the process's arguments, and exit."""
    try:
        sys.exit(run(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvferry"):
            raise
        sys.exit(f"kvferryd: {error.name} is missing. Install the server with: pip install 'kvferry[server]'")


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments. Returns the exit code."""
    # gRPC may read the variable as soon as it is imported, and below INFO it does not log failed handshakes.
    verbose = os.environ.get("GRPC_VERBOSITY", "").upper() in ("INFO", "DEBUG")
    if not verbose:
        os.environ.pop("GRPC_VERBOSITY", None)
    # Imported here, so that `main` can say which package of the extra is missing.
    from kvferry_server.node import loading
    from kvferry_server.node.logs import NativeLog

    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=110)
    parser = argparse.ArgumentParser(
        "kvferryd", description=DESCRIPTION, epilog=EPILOG, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvferryd {kvferry.__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings. [none; KVFERRYD_CONFIG]")
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="Print every setting with its value and its origin, say what is wrong with them and with the files that "
        "they name, and exit: with 2, if anything is.",
    )
    loading.add_flags(parser)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    file, check_only = flags.pop("config"), flags.pop("check_config")
    try:
        loaded = loading.load(flags, loading.config_file(file))
    except loading.BadConfig as error:
        return _refuse(error.message.splitlines())
    unread = loading.unread_variables(os.environ)
    little_memory = loading.memory_problems(loaded)
    if check_only:
        print(loaded.describe())
        problems = loading.file_problems(loaded) + little_memory
        _refuse((*problems, *unread))
        return 2 if problems else 0
    native = NativeLog(loaded.config.log_level, loaded.config.log_format, verbose=verbose)
    try:
        return _run(loaded, native, (*unread, *little_memory))
    finally:
        native.close()


def _refuse(lines: Iterable[str]) -> int:
    for line in lines:
        print(f"kvferryd: {line}", file=sys.stderr)
    return 2


def _run(loaded: Loaded, native: NativeLog, warnings: Iterable[str]) -> int:
    import uvloop

    from kvferry_server.node.limits import SWITCH_INTERVAL
    from kvferry_server.node.memory import use_few_arenas

    for line in warnings:
        logger.warning("%s", line)
    # Arenas and switch interval are set here and not in NodeServer, because they apply to the whole process.
    use_few_arenas()
    # While the worker thread compares geometries, the event loop waits at most this long for the interpreter. With
    # Python's default of 5 ms, renewals take tenths of a second while a hundred ranks handshake.
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        uvloop.run(_serve(loaded, native))
    except ModuleNotFoundError:
        raise
    except Exception as error:
        if not isinstance(error, KvferryError) or isinstance(error, InternalError):
            logger.critical("kvferryd has failed", exc_info=error)
        # As text for people, like all commands, unless the log is JSON.
        elif loaded.config.log_format == "json":
            logger.critical("%s", error)
        else:
            print(f"kvferryd: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1
    return 0


async def _serve(loaded: Loaded, native: NativeLog) -> None:
    from kvferry_server.node.connections import raise_file_limit
    from kvferry_server.node.limits import DRAIN_STREAMS, STOP_MARGIN
    from kvferry_server.node.server import NodeServer

    signals: asyncio.Queue[signal.Signals | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def ended(_: object) -> None:
        signals.put_nowait(None)

    # By default SIGHUP ends the process without a drain, for example when a terminal closes.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = NodeServer(loaded.config, failed_handshakes=native.failed_handshakes)
    raise_file_limit()
    # Otherwise each full collection looks at all that was imported, and all calls wait 40 ms for it.
    gc.freeze()
    await server.start()
    # People and scripts learn the real ports from this line.
    told = {
        "version": kvferry.__version__,
        "addresses": " and ".join(server.addresses),
        "advertise": server.advertise,
        "epoch": server.home.epoch.hex()[:8],
        "admin": f"http://{server.admin}/" if server.admin else "",
    }
    line = "kvferryd %(version)s ready: listens on %(addresses)s, advertises %(advertise)s, epoch %(epoch)s"
    line += ", admin %(admin)s" if server.admin else ""
    # Passed to the handlers directly, so that it appears at every log level, and as an info message.
    fields = {"event": "ready", **told}
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (told,), None, extra=fields))
    # What systemd shows of a unit that serves.
    ready = ("READY=1", f"STATUS=listens on {told['addresses']}")
    _tell_systemd(*ready)

    failed = asyncio.ensure_future(server.failed())
    failed.add_done_callback(ended)
    while (received := await signals.get()) is signal.SIGHUP:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        _tell_systemd("RELOADING=1", f"MONOTONIC_USEC={now}")
        logger.info("SIGHUP: reading the policy and the TLS files again; other settings need a restart")
        try:
            await server.reload()
        except Exception:
            logger.exception("the reload failed; the former policy or certificate stays in use")
        # Also after a failure: until then systemd shows the unit as reloading.
        _tell_systemd(*ready)
    if received is None:
        await server.stop(0)
        # Raises the reason.
        await failed
        return
    failed.remove_done_callback(ended)
    failed.cancel()
    drain = loaded.config.drain
    # Otherwise systemd kills the process when its own time for a stop is over.
    longest = (drain + DRAIN_STREAMS + STOP_MARGIN) * 1e6
    _tell_systemd("STOPPING=1", f"STATUS=draining for at most {drain:g} s", f"EXTEND_TIMEOUT_USEC={longest:.0f}")
    logger.info("%s: draining for at most %g s", received.name, drain)
    drained = asyncio.ensure_future(server.stop())
    drained.add_done_callback(ended)
    # None may be that of a failure which came after the signal.
    while (again := await signals.get()) is signal.SIGHUP or (again is None and not drained.done()):
        pass
    if again is not None:
        logger.warning("%s while draining: stopping at once", again.name)
        drained.cancel()
        await asyncio.wait([drained])
        await server.stop(0)
    else:
        await drained
    logger.info("stopped")


def _tell_systemd(*lines: str) -> None:
    """Report the state of this process, in systemd's protocol for units of `Type=notify`, if the environment names a
    socket (`NOTIFY_SOCKET`). Never raises and never waits: a service manager that is gone or busy is no reason to stop
    serving. Written here, because systemd's own binding needs a compiler, and pure-Python ones are not maintained."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # "@" stands for the zero byte that begins names in Linux's abstract namespace.
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
            manager.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.warning("could not notify the service manager of %s: %s", lines[0], error)


if __name__ == "__main__":
    main()
