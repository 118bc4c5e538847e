"""Loads the settings of a node server, and says what is wrong with them and where it came from.

Flags win over the environment (``KVFERRYD_…``), which wins over a TOML file (``--config``), which wins over the
defaults. An error names the setting, its value and the value's origin; `kvferryd --check-config` prints all three for
every setting.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from kvferry.errors import InvalidField, KvferryError
from kvferry_server.node.config import ENV_PREFIX, NodeConfig, shown

CONFIG_FILE = ENV_PREFIX + "CONFIG"


class BadConfig(KvferryError):
    """Settings are wrong. The message has a line for each. Values, for the first: setting, value, origin, problem."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the origin of each: ``--flag``, ``KVFERRYD_NAME``, a file, or ``default``."""

    config: NodeConfig
    origins: Mapping[str, str]

    def describe(self) -> str:
        """Return the effective settings as TOML that `--config` takes, with the origins as comments."""
        lines = []
        for name in NodeConfig.model_fields:
            value = getattr(self.config, name)
            # Strings, numbers and booleans are written alike in JSON and TOML.
            text = json.dumps("" if value is None else str(value) if isinstance(value, Path) else value)
            lines.append(f"{f'{name} = {text}':<44} # {self.origins[name]}")
        return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting to a parser, in groups, with the default and the name in the environment."""
    groups: dict[str, Any] = {}
    for name, field in NodeConfig.model_fields.items():
        extra = field.json_schema_extra
        hints: Mapping[str, Any] = extra if isinstance(extra, dict) else {}
        title = str(hints["group"])
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        default = "none" if field.default in (None, "") else "no" if field.default is False else field.default
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": f"{field.description} [{default}; {ENV_PREFIX}{name.upper()}]".replace("%", "%%"),
        }
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = hints.get("metavar", "SECONDS" if field.annotation is float else "LEVEL")
        group.add_argument(_flag(name), **options)


def load(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """Load the settings from all sources.

    Args:
        flags: the flags that were given, by setting.
        file: the TOML file; None: none.

    Raises:
        BadConfig: settings are wrong; the message has a line for each.
    """
    sources: list[tuple[Mapping[str, Any], str]] = [
        (flags, "flag"),
        (EnvSettingsSource(NodeConfig)(), "environment"),
        (_read_file(file) if file is not None else {}, str(file)),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(NodeConfig.model_fields, "default")
    for source, kind in reversed(sources):
        for name, value in source.items():
            values[name] = value
            origins[name] = {"flag": _flag(name), "environment": ENV_PREFIX + name.upper()}.get(kind, kind)
    return Loaded(_validated(values, origins), origins)


def configure(**settings: Any) -> NodeConfig:
    """Return the settings of a server that a program starts: what it passes, otherwise the defaults. Reads neither the
    environment nor a file.

    Raises:
        BadConfig: settings are wrong; the message has a line for each.
    """
    return _validated(settings, dict.fromkeys(settings, "the caller"))


def config_file(flag: str | None) -> Path | None:
    """Return the TOML file that ``--config`` names, otherwise the one that ``KVFERRYD_CONFIG`` names; None: neither."""
    name = flag if flag is not None else os.environ.get(CONFIG_FILE, "")
    return Path(name) if name else None


def _validated(values: Mapping[str, Any], origins: Mapping[str, str]) -> NodeConfig:
    try:
        return NodeConfig(**values)
    except ValidationError as error:
        raise _explain(error.errors(), values, origins) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_file(path: Path) -> dict[str, Any]:
    # pydantic's source skips files that do not exist, but this one was named.
    problem = f"{path} does not exist"
    try:
        if path.is_file():
            return TomlConfigSettingsSource(NodeConfig, path)()
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path}: {error}"
    raise BadConfig(problem, setting="config", value=path, origin="--config", problem=problem)


def _explain(errors: Sequence[ErrorDetails], values: Mapping[str, Any], origins: Mapping[str, str]) -> BadConfig:
    lines: list[str] = []
    found: dict[str, str] = {}
    for detail in errors:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidField):
            name, problem = cause.values["field"], f"expected {cause.values['expected']}"
        else:
            name = str(detail["loc"][0]) if detail["loc"] else "configuration"
            problem = detail["msg"][0].lower() + detail["msg"][1:]
        if detail["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, NodeConfig.model_fields, n=1)
            problem = "no such setting" + (f"; did you mean {close[0]}?" if close else "")
        value = values.get(name, NodeConfig.model_fields[name].default if name in NodeConfig.model_fields else None)
        origin = origins.get(name, "default")
        value = shown(value)
        lines.append(f"{name} is {value!r} (from {origin}): {problem}")
        found = found or {"setting": name, "value": str(value), "origin": origin, "problem": problem}
    error = BadConfig("\n".join(lines))
    error.values = found
    return error
