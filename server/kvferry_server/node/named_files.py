"""Whether the files that settings name can be used: what `kvferryd --check-config` opens."""

from __future__ import annotations

import time

from kvferry._wire.channel import read_tls, tls_problems
from kvferry.errors import InvalidField
from kvferry_server.node.certificates import validity
from kvferry_server.node.config import Loaded
from kvferry_server.node.policy_file import read_policy


def file_problems(loaded: Loaded) -> list[str]:
    """Return a line for each file that cannot be used: its setting, its path, where that comes from, and why."""
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
    return [
        f"{error.values['field']} is {error.values['value']} (from {loaded.origins[error.values['field']]}): "
        f"expected {error.values['expected']}"
        for error in problems
    ]


def _out_of_time(loaded: Loaded) -> list[InvalidField]:
    tls = loaded.config.tls
    if tls is None:
        return []
    try:
        start, end = validity(read_tls(tls), tls)
    except InvalidField as error:
        return [error]
    if start <= time.time() < end:
        return []
    return [InvalidField("tls_cert", str(tls.cert), "a certificate that is valid now; look with openssl x509 -dates")]
