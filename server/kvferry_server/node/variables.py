"""Variables of the environment that look like settings of kvferryd and are none: misspelt ones, and those with the
prefix of clients, which would otherwise be ignored without a word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from kvferry_server.node.config import ENV_PREFIX, NodeConfig
from kvferry_server.node.loading import CONFIG_FILE

CLIENT_PREFIX = "KVFERRY_"
"""Begins the names of what the command line and engines read. Settings of kvferryd had it, too."""

OF_CLIENTS = (
    "KVFERRY_SERVER",
    "KVFERRY_ADDRESS",
    "KVFERRY_ALLOWED_HOMES",
    "KVFERRY_DIRECTORY",
    "KVFERRY_ENGINE_ID",
    "KVFERRY_LAYER_NAMES",
    "KVFERRY_PROMPT_CHECK",
    "KVFERRY_READ_TIMEOUT",
    "KVFERRY_START_TIMEOUT",
    "KVFERRY_TLS_CA",
    "KVFERRY_TLS_CERT",
    "KVFERRY_TLS_KEY",
)
"""What the command line and engines read."""

OF_KUBERNETES = re.compile(r"KVFERRY\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)=.*|KVFERRY\w*_PORT=\w+://.*")
"""What Kubernetes sets in every container beside a Service whose name begins with kvferry: names and values."""


def renamed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that sets a setting of kvferryd by its former name, in order. To ignore them
    would be to serve without a policy that was set."""
    return [
        f"{name} is not read any more: its name is {ENV_PREFIX}{setting} now"
        for name in sorted(environment)
        if (setting := _setting(name)) and name.upper() not in OF_CLIENTS
    ]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable of the environment that begins as kvferry's do and that kvferryd does not
    read though it may be meant for it, in order; it names the one that was probably meant. Values are not shown."""
    settings = [ENV_PREFIX + name.upper() for name in NodeConfig.model_fields]
    known = sorted({*settings, CONFIG_FILE, *OF_CLIENTS})
    # Settings are found whatever their case.
    given = {name.upper() for name in environment}
    sentences = []
    for name, value in sorted(environment.items()):
        upper = name.upper()
        if upper in OF_CLIENTS:
            if (setting := _setting(name)) and ENV_PREFIX + setting not in given:
                sentences.append(f"{name} is read by clients only; kvferryd reads {ENV_PREFIX}{setting}")
            continue
        if not upper.startswith((ENV_PREFIX, CLIENT_PREFIX)) or upper in known:
            continue
        if OF_KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        # The prefixes would make everything alike.
        rest = [one.partition("_")[2] for one in known]
        close = difflib.get_close_matches(upper.partition("_")[2], rest, n=1)
        meant = f"; did you mean {known[rest.index(close[0])]}?" if close else ""
        sentences.append(f"nothing reads the variable {name}{meant}")
    return sentences


def _setting(name: str) -> str:
    """Return the setting of kvferryd, in upper case, that a variable with the prefix of clients names; empty: none."""
    setting = name.upper().removeprefix(CLIENT_PREFIX)
    found = setting != name.upper() and (setting.lower() in NodeConfig.model_fields or setting == "CONFIG")
    return setting if found else ""
