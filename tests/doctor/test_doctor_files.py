"""Checks that read files of the system, shown the files of machines that we do not have. The trees of GPUs and RDMA
cards are written by hand in the form of the kernel's documentation; nothing of them ran on such hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry._doctor import system
from kvferry._doctor.check import Host
from tests.doctor.looking import names, write

MLX5 = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
}
GPU = {
    "/proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 130\n",
    "/dev/nvidia0": "",
}


def seen(root: Path, *trees: dict[str, str], **env: str) -> Host:
    for tree in trees:
        write(root, tree)
    return Host(root=root, environ=env)


def test_locked_memory_matters_only_with_rdma(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = 8 << 20 if hard == resource.RLIM_INFINITY else min(8 << 20, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limited, hard))
    try:
        assert names(system.locked_memory(seen(tmp_path, MLX5))) == {"locked-memory-little"}
        root = seen(tmp_path / "root", MLX5, {"/proc/self/status": "CapEff:\t000001ffffffffff\n"})
        assert names(system.locked_memory(root)) == {"locked-memory-enough"}
        assert names(system.locked_memory(Host(root=tmp_path / "none"))) == {"locked-memory-enough"}
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_gpu(tmp_path: Path) -> None:
    host = seen(tmp_path, GPU)
    found = system.gpu(host)
    assert names(found) == {"gpu-found"}
    assert "H100" in found[0].found
    assert "gpu-no-peer-memory" in names(system.gpu(seen(tmp_path, MLX5)))
    write(tmp_path, {"/proc/modules": "nvidia_peermem 16384 0 - Live 0x0\n"})
    assert "gpu-no-peer-memory" not in names(system.gpu(host))
    assert names(system.gpu(Host(root=tmp_path / "none"))) == {"gpu-none"}


@pytest.mark.parametrize(
    ("env", "trees", "finding"),
    [
        ({}, [], "environment-clear"),
        ({"UCX_TLS": "all"}, [], "environment-clear"),
        ({"UCX_TLS": "tcp,sm"}, [], "environment-clear"),
        ({"UCX_TLS": "sm"}, [], "ucx-tls-without-tcp"),
        ({"UCX_TLS": "^tcp"}, [], "ucx-tls-without-tcp"),
        ({"UCX_TLS": "tcp"}, [], "ucx-tls-without-cma"),
        ({"UCX_TLS": "^cma"}, [], "ucx-tls-without-cma"),
        ({"UCX_TLS": "tcp,cma"}, [MLX5], "ucx-tls-without-rdma"),
        ({"UCX_TLS": "tcp,cma"}, [GPU], "ucx-tls-without-cuda"),
        ({"UCX_TCP_RX_SEG_SIZE": "8k"}, [], "ucx-tcp-segments"),
        ({"UCX_TCP_RX_SEG_SIZE": "1m"}, [], "environment-clear"),
        ({"UCX_TCP_USER_TIMEOUT": "5s"}, [], "ucx-tcp-user-timeout"),
        ({"UCX_RCACHE_MAX_UNRELEASED": "inf"}, [], "ucx-rcache-unbounded"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, [], "torch-expandable-segments"),
    ],
)
def test_environment_variables_that_harm_are_found(
    tmp_path: Path, env: dict[str, str], trees: list[dict[str, str]], finding: str
) -> None:
    found = system.environment(seen(tmp_path, *trees, **env))
    assert names(found) == {finding}
    if finding != "environment-clear":
        assert all(value in found[0].found for value in env.values())


def test_huge_pages_that_are_off_or_given_only_on_request_are_found(tmp_path: Path) -> None:
    mode = "/sys/kernel/mm/transparent_hugepage/enabled"
    assert names(system.huge_pages(seen(tmp_path, {mode: "always madvise [never]\n"}))) == {"huge-pages-off"}
    assert names(system.huge_pages(Host(root=tmp_path / "none"))) == {"huge-pages-off"}


def test_quota_of_the_container(tmp_path: Path) -> None:
    folder = "/sys/fs/cgroup/pods/one"
    write(tmp_path, {"/proc/self/cgroup": "2:cpuacct:/old\n0::/pods/one\n", f"{folder}/cpu.max": "150000 100000\n"})
    write(tmp_path, {f"{folder}/cpu.stat": "nr_periods 100\nnr_throttled 40\n"})
    found = system.cpus(Host(root=tmp_path))
    assert names(found) == {"cpus-few", "cpus-throttled"}
    assert "1.5 cores" in found[0].found
    assert "40 of 100" in found[1].found
