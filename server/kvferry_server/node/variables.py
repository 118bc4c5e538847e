"""Variables of the environment that look like settings of kvferryd and are none: mostly misspelt ones, which would
otherwise be ignored without a word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from kvferry_server.node.config import ENV_PREFIX, NodeConfig
from kvferry_server.node.loading import CONFIG_FILE

OF_CLIENTS = (
    "KVFERRY_SERVER",
    "KVFERRY_ADDRESS",
    "KVFERRY_ALLOWED_HOMES",
    "KVFERRY_ENGINE_ID",
    "KVFERRY_LAYER_NAMES",
    "KVFERRY_READ_TIMEOUT",
    "KVFERRY_START_TIMEOUT",
)
"""What the command line and engines read besides those that they share with kvferryd."""

OF_KUBERNETES = re.compile(r"KVFERRY\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)=.*|KVFERRY\w*_PORT=\w+://.*")
"""What Kubernetes sets in every container beside a Service whose name begins with kvferry: names and values."""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable of the environment that begins as kvferry's do and that nothing reads, in
    order; it names the one that was probably meant. Values are not shown."""
    settings = [ENV_PREFIX + name.upper() for name in NodeConfig.model_fields]
    known = {*settings, CONFIG_FILE, *OF_CLIENTS}
    sentences = []
    for name, value in sorted(environment.items()):
        # Settings are found whatever their case.
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in known:
            continue
        if OF_KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        # The prefix, which all have, would make everything alike.
        rest = [one.removeprefix(ENV_PREFIX) for one in sorted(known)]
        close = difflib.get_close_matches(name.upper().removeprefix(ENV_PREFIX), rest, n=1)
        meant = f"; did you mean {ENV_PREFIX}{close[0]}?" if close else ""
        sentences.append(f"nothing reads the variable {name}{meant}")
    return sentences
