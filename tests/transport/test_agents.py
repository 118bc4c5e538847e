"""The wrappers around NIXL: calls that would crash NIXL raise instead."""

import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry._clock import now
from kvferry._transport import host_network
from kvferry._transport.bounds import check_agent
from kvferry._transport.host_network import open_sockets, tcp_since
from kvferry._transport.nixl_agent import HandleState, NixlOptions, ReadHandle, ReadingAgent, ServingAgent, WrongThread
from kvferry.errors import Closed, InvalidField
from kvferry.geometry import MemoryKind, MemoryRegion
from tests.transport.sources import SOON, Memory, Source


def wait_for(handle: ReadHandle, state: HandleState) -> HandleState:
    until = now() + SOON
    while state is HandleState.MOVING and now() < until:
        state = handle.check()
    return state


def test_a_handle_is_useless_after_its_release_and_after_its_agents_end(
    ucx_tls: str, source: Source, memory: Memory
) -> None:
    agent = ReadingAgent(f"handles-{ucx_tls}", [memory.region], NixlOptions(ucx_tls=ucx_tls))
    agent.add_peer(source.info)
    handle = agent.warm_up(source.name)
    assert wait_for(handle, handle.post()) is HandleState.DONE
    handle.release()
    handle.release()
    for use in (handle.post, handle.check):
        with pytest.raises(Closed):
            use()
    kept = agent.make(source.name, memory.all_of(source))
    assert wait_for(kept, kept.post()) is HandleState.DONE
    assert agent.destroy()
    for use in (kept.post, kept.check):
        with pytest.raises(Closed):
            use()
    with pytest.raises(Closed):
        agent.destroy()
    kept.release()
    assert memory.right()


def test_a_connection_over_tcp_is_seen(source: Source, memory: Memory) -> None:
    agent = ReadingAgent("connected", [memory.region], NixlOptions(ucx_tls="tcp"))
    agent.add_peer(source.info)
    handle = agent.warm_up(source.name)
    assert wait_for(handle, handle.post()) is HandleState.DONE
    assert agent.over_tcp(source.name)
    assert agent.destroy()


def test_peers_are_read_where_the_sockets_of_this_process_cannot_be_listed(
    source: Source, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a change of user, in a sandbox without /proc, and where no file descriptor is left.
    agent = ReadingAgent("unlisted", [memory.region], NixlOptions(ucx_tls="tcp"))
    monkeypatch.setattr(host_network, "FOLDER", Path("/nowhere"))
    agent.add_peer(source.info)
    handle = agent.warm_up(source.name)
    assert wait_for(handle, handle.post()) is HandleState.DONE
    assert agent.over_tcp(source.name)
    monkeypatch.undo()
    # Known now, and not before.
    assert agent.over_tcp(source.name)
    assert agent.destroy()


def test_connections_of_another_backend_count_as_tcp(memory: Memory) -> None:
    agent = ReadingAgent("other", [memory.region], NixlOptions(backend="POSIX"))
    assert agent.over_tcp("any")
    assert agent.destroy()


def test_tcp_is_seen_without_touching_the_sockets_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_sockets()
    with socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        assert not tcp_since(before)
        with socket.socket(socket.AF_INET6) as found:
            blocking = os.get_blocking(found.fileno())
            socket.setdefaulttimeout(1.0)
            try:
                descriptors = sorted(host_network.FOLDER.iterdir())
                assert tcp_since(before)
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(found.fileno()) == blocking
            assert sorted(host_network.FOLDER.iterdir()) == descriptors
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            known = open_sockets()
            monkeypatch.setattr(host_network, "open_sockets", lambda: known)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                assert tcp_since(before)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_reading_agent_refuses_other_threads(source: Source, memory: Memory) -> None:
    agent = ReadingAgent("owned", [memory.region], NixlOptions())
    errors: list[BaseException] = []

    def use() -> None:
        for call in (lambda: agent.add_peer(source.info), agent.destroy, lambda: agent.warm_up("x")):
            try:
                call()
            except WrongThread as error:
                errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 3
    assert agent.destroy()


def test_a_serving_agent_announces_what_it_registered(memory: Memory) -> None:
    agent = ServingAgent("announced", [memory.region])
    check_agent(agent.info)
    assert agent.info.regions == (memory.region,)
    agent.close()
    agent.close()


def test_a_serving_agent_needs_memory() -> None:
    with pytest.raises(InvalidField):
        ServingAgent("nothing", [])


@pytest.mark.parametrize("options", [{"ucx_tls": "tcp,cma"}, {"chunk_bytes": 0}, {"fence_time": -1.0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidField):
        NixlOptions(**options)  # type: ignore[arg-type]


def test_the_error_without_nixl_names_the_package_to_install() -> None:
    code = """
import sys
for package in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
    sys.modules[package] = None
import kvferry
from kvferry._transport.nixl_agent import NixlMissing, ServingAgent
from kvferry.geometry import MemoryKind, MemoryRegion
try:
    ServingAgent("x", [MemoryRegion(MemoryKind.DRAM, 0, 4096, 4096)])
except NixlMissing as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvferry[nixl]'" in done.stdout


def test_registering_needs_no_mapped_memory_but_a_sane_region() -> None:
    with pytest.raises(ValueError, match="memory region"):
        MemoryRegion(MemoryKind.DRAM, 0, 4096, 0)
