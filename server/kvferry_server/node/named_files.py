"""The checks of `kvferryd --check-config`: settings, the files that they name, and memory."""

from __future__ import annotations

import time

from kvferry._wire.channel import MAX_CLIENT_CHAIN_BYTES, Address, chain_bytes, read_tls, tls_problems
from kvferry.errors import InvalidField
from kvferry_server.node.certificates import check_in_time, validity
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.limits import WORKING_MEMORY
from kvferry_server.node.listen import advertised, check_exposure
from kvferry_server.node.loading import Loaded
from kvferry_server.node.memory import memory_limit
from kvferry_server.node.policy_file import read_policy


def file_problems(loaded: Loaded) -> list[str]:
    """Return a line for each unusable file, and for addresses with which kvferryd would not start: the setting, its
    value and origin, and the expected value."""
    config = loaded.config
    problems = list[InvalidField]() if config.tls is None else tls_problems(config.tls)
    checks = (_check_policy, _check_addresses) if problems else (_check_dates, _check_policy, _check_addresses)
    for check in checks:
        try:
            check(config)
        except InvalidField as error:
            problems.append(error)
    return [
        f"{error.values['field']} is {error.values['value']} (from {loaded.origins[error.values['field']]}): "
        f"expected {error.values['expected']}"
        for error in problems
    ]


def memory_problems(loaded: Loaded) -> list[str]:
    """Return a line if the settings let the process take more memory than it may have: the kernel would kill it before
    its limits refuse anything."""
    config, limit = loaded.config, memory_limit()
    needed = config.home_memory + WORKING_MEMORY
    if needed <= limit:
        return []
    return [
        f"memory is {_mib(config.home_memory)} (from {loaded.origins['memory']}): with {_mib(WORKING_MEMORY)} for what "
        f"it works on, kvferryd may take {_mib(needed)}, and its cgroup or host lets it have {_mib(limit)}"
    ]


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def warnings(config: NodeConfig) -> list[str]:
    """Return a line for each file that can be used only in part."""
    if config.tls is None or config.tls.cert is None or config.tls.ca is None:
        return []
    try:
        size = chain_bytes(config.tls.cert.read_bytes())
    except OSError:
        return []
    if size <= MAX_CLIENT_CHAIN_BYTES:
        return []
    return [
        f"tls_cert has {size} bytes of certificates: this server can show them, but gRPC's servers take at most "
        f"{MAX_CLIENT_CHAIN_BYTES} from a client, so it cannot relay to other homes, and engines cannot use this file"
    ]


def _check_dates(config: NodeConfig) -> None:
    if config.tls is not None:
        check_in_time(config.tls, validity(read_tls(config.tls), config.tls), time.time())


def _check_policy(config: NodeConfig) -> None:
    if config.policy is not None:
        read_policy(config.policy)


def _check_addresses(config: NodeConfig) -> None:
    """Raise `InvalidField` as the start of kvferryd would, without taking a port."""
    check_exposure(config)
    unix = config.unix_path
    advertised(config.advertise, config.listen_address, Address(path=str(unix)) if unix is not None else None)
