"""A node server inside a process."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import typing
from concurrent.futures import Future
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvferry import ServerSettings, _embed
from kvferry._embed import serve
from kvferry.errors import KvferryError
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.server import NodeServer
from tests.support.node_servers import environment, serves


def test_an_embedded_server_serves_until_it_is_closed(tmp_path: Path) -> None:
    with serve(unix=str(tmp_path / "node.sock"), ttl=5.0) as server:
        assert server.address == f"unix:{tmp_path}/node.sock"
        assert server.advertise == server.addresses[1]
        assert all(serves(address) for address in server.addresses)
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_several_servers_live_side_by_side_but_not_on_one_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "node.sock")
    with serve("", unix=path) as first, serve() as second:
        assert serves(first.address)
        assert serves(second.address)
        with pytest.raises(KvferryError, match="another node server has it"):
            serve("", unix=path)
        assert serves(first.address)
    with serve("", unix=path) as again:
        assert serves(again.address)


def test_ctrl_c_while_a_server_starts_ends_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupted(Future[NodeServer]):
        def result(self, timeout: float | None = None) -> NodeServer:
            raise KeyboardInterrupt

    monkeypatch.setattr(_embed, "Future", Interrupted)
    caught: Future[object] = Future()

    def start() -> None:
        with pytest.raises(KeyboardInterrupt):
            serve("", unix=str(tmp_path / "node.sock"))
        caught.set_result(None)

    # On a thread, so that a server that goes on does not keep this test for ever.
    threading.Thread(target=start, daemon=True).start()
    caught.result(30.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"ttl": "soon"}, "ttl"), ({"tll": 3}, "did you mean ttl"), ({"listen": "0.0.0.0:0"}, "--insecure")],
)
def test_wrong_settings_are_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(KvferryError, match=says):
        serve(**settings)  # type: ignore[arg-type]


def test_serve_takes_every_setting_of_the_server_with_its_type() -> None:
    settings = {name: field.annotation for name, field in NodeConfig.model_fields.items()}
    # Only kvferryd sets up logging. `serve` takes a size as whatever pydantic converts to one.
    del settings["log_level"], settings["log_format"]
    assert typing.get_type_hints(ServerSettings) | {"listen": str, "unix": str, "memory": ByteSize} == settings
    assert set(inspect.signature(serve).parameters) == {"listen", "unix", "settings"}


def test_the_end_of_the_process_leaves_no_file(tmp_path: Path) -> None:
    code = f"import kvferry; print(kvferry.serve('', unix={str(tmp_path / 'node.sock')!r}).address)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True, timeout=60
    )
    assert done.stdout.strip() == f"unix:{tmp_path}/node.sock"
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys, kvferry
server = kvferry.serve("", unix=sys.argv[1])
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    server.close()
    os.write(writing, b"closed")
    os.read(0, 1)
    os._exit(0)
assert os.read(reading, 6) == b"closed"
assert os.path.exists(sys.argv[1])
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_neither_closes_the_server_nor_keeps_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "node.sock")
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit()
        assert parent.wait(30) == -9
        # The parent was killed; its child lives on.
        with serve("", unix=path) as server:
            assert serves(server.address)
    finally:
        # End of file on its standard input ends the child.
        parent.communicate()


def test_serve_without_the_extra_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvferry; kvferry.serve()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert "ImportError: kvferry.serve() needs uvloop" in done.stderr
    assert "pip install 'kvferry[server]'" in done.stderr
