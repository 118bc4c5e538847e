"""The memory limits of a node server, and when it gives memory back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvferry.errors import LimitReached
from kvferry_server.domain.engine import Process, Role
from kvferry_server.node import memory
from kvferry_server.node.limits import MAX_HOME_MEMORY, MIN_HOME_MEMORY, WORKING_MEMORY
from kvferry_server.node.loading import BadConfig, configure
from kvferry_server.node.memory import TRIM_BYTES, home_memory, memory_limit
from kvferry_server.node.server import NodeServer
from tests.support.memory_groups import in_group, memory_group
from tests.support.node_servers import Kvferryd, refused
from tests.support.parties import SECRETS, offer, start

HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20


def trees(folder: Path, cgroup: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A procfs and a tree of cgroups with this content."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {}, HOST),
        ("0::/pod/box\n", {"pod/box/memory.max": "max", "pod/memory.max": f"{256 * MIB}"}, 256 * MIB),
        ("0::/pod/box\n", {"pod/box/memory.max": f"{64 * MIB}", "pod/memory.max": f"{256 * MIB}"}, 64 * MIB),
        # In a container without its own namespace, only its own group is mounted, as the root.
        ("0::/kubepods/pod7\n", {"memory.max": f"{128 * MIB}"}, 128 * MIB),
        ("4:memory:/a/b\n0::/\n", {"memory/a/b/memory.limit_in_bytes": f"{512 * MIB}"}, 512 * MIB),
        ("4:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": f"{512 * MIB}"}, 512 * MIB),
        # cgroup v1 without a limit.
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, HOST),
    ],
)
def test_memory_limit_is_the_least_of_all_cgroups_and_the_host(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int
) -> None:
    assert memory_limit(*trees(tmp_path, cgroup, limits)) == expected


def test_memory_limit_without_procfs_is_the_hosts(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path) == HOST


def test_homes_budget_is_half_of_the_memory_and_leaves_room_to_work() -> None:
    assert home_memory(1 << 30) == 512 * MIB
    assert home_memory(1 << 40) == MAX_HOME_MEMORY
    assert home_memory(512 * MIB) == 512 * MIB - WORKING_MEMORY
    assert home_memory(64 * MIB) == MIN_HOME_MEMORY


def test_memory_setting_takes_bytes_and_units_and_refuses_too_little() -> None:
    assert configure(memory="96MiB").home_memory == configure(memory=96 * MIB).home_memory == 96 * MIB
    assert configure().home_memory == home_memory(memory_limit())
    with pytest.raises(BadConfig) as caught:
        configure(memory="1MiB")
    assert "at least 16MiB" in str(caught.value)


async def test_many_engines_together_keep_within_the_memory(tmp_path: Path) -> None:
    server = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", memory="16MiB"))
    await server.start()
    home, full = server.home, 0
    for number in range(100):
        ref = start(f"engine-{number}", "abcdefghij"[number // 10] + "0123456789"[number % 10])
        try:
            with home.turn():
                home.open_watch(Process(ref, Role.SCHEDULER), SECRETS[ref])
                for publication in range(1, 17):
                    home.sources.publish(ref, offer(publication, payload=bytes(65_536)))
        except LimitReached:
            full += 1
    await server.stop(0)
    assert full
    assert home.memory.used <= 16 * MIB


def test_check_config_refuses_a_budget_that_the_memory_does_not_hold() -> None:
    answer = refused("--check-config", "--memory", str(HOST))
    assert answer.returncode == 2
    assert "memory is" in answer.stderr
    assert "--memory" in answer.stderr
    assert refused("--check-config", "--memory", "16MiB").returncode == 0


def test_kvferryd_in_a_cgroup_takes_half_of_its_memory_and_warns_if_that_is_too_little(tmp_path: Path) -> None:
    with memory_group(256 * MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        flags = ["--listen", "", "--unix", str(tmp_path / "s"), "--drain", "0"]
        with Kvferryd(*flags, program=in_group(group)) as server:
            assert "memory is 16 MiB (from default)" in server.log
            assert "lets it have 256 MiB" in server.log


async def test_memory_is_given_back_only_after_much_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_on = held = 0
    trims = list[str]()
    monkeypatch.setattr(memory, "TRIM_POLL", 0)
    monkeypatch.setattr(memory, "_of_glibc", lambda name, *_: trims.append(name))
    running = asyncio.create_task(memory.give_back(lambda: worked_on, lambda: held))

    async def given_back() -> int:
        trims.clear()
        for _ in range(20):
            await asyncio.sleep(0.001)
        return len(trims)

    worked_on = TRIM_BYTES - 1
    assert await given_back() == 0
    worked_on += 1
    assert await given_back() == 2, "once more for what was still in use"
    held = 2 * TRIM_BYTES
    assert await given_back() == 0, "what the home holds is not free"
    held = TRIM_BYTES
    assert await given_back() == 2
    running.cancel()
