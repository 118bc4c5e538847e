"""Whether kvferryd can use its settings and the files that they name: what `kvferryd --check-config` looks at."""

from __future__ import annotations

import time

from kvferry._wire.channel import Address, read_tls, tls_problems
from kvferry.errors import InvalidField
from kvferry_server.node.certificates import check_in_time, validity
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.listen import advertised, check_exposure
from kvferry_server.node.loading import Loaded
from kvferry_server.node.policy_file import read_policy


def file_problems(loaded: Loaded) -> list[str]:
    """Return a line for each file that cannot be used, and for addresses with which kvferryd would not start: its
    setting, its value, where that comes from, and why."""
    config, problems = loaded.config, list[InvalidField]()
    if config.tls is not None:
        problems.extend(tls_problems(config.tls))
        if not problems:
            problems.extend(_out_of_time(loaded))
    if config.policy is not None:
        try:
            read_policy(config.policy)
        except InvalidField as error:
            problems.append(error)
    try:
        _check_addresses(config)
    except InvalidField as error:
        problems.append(error)
    return [
        f"{error.values['field']} is {error.values['value']} (from {loaded.origins[error.values['field']]}): "
        f"expected {error.values['expected']}"
        for error in problems
    ]


def _check_addresses(config: NodeConfig) -> None:
    """Raise `InvalidField` as kvferryd would at its start. No port is taken."""
    listening, unix = config.listen_address, config.unix_path
    if listening is not None:
        check_exposure(listening, config.tls, insecure=config.insecure, anonymous_tls=config.anonymous_tls)
    advertised(config.advertise, listening, Address(path=str(unix)) if unix is not None else None)


def _out_of_time(loaded: Loaded) -> list[InvalidField]:
    tls = loaded.config.tls
    if tls is None:
        return []
    try:
        start, end = validity(read_tls(tls), tls)
        check_in_time(tls, start <= time.time() < end)
    except InvalidField as error:
        return [error]
    return []
