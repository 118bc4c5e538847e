"""Loads the settings of a node server and the policy file, and explains wrong ones with their origin.

Flags win over the environment (``KVFERRYD_…``), which wins over a TOML file (``--config``), which wins over defaults.
`kvferryd --check-config` prints every setting with its value and origin, and checks files and memory.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError

from kvferry._directory.opening import parse_toml
from kvferry._wire.channel import TlsConfig, read_tls
from kvferry.errors import InvalidField, KvferryError
from kvferry_server.node.certificates import check_in_time
from kvferry_server.node.config import ENV_PREFIX, GROUPS, NodeConfig, shown
from kvferry_server.node.limits import WORKING_MEMORY
from kvferry_server.node.memory import memory_limit
from kvferry_server.servicers.access import ANYBODY, EVERY, Grant, Policy, Rule

CONFIG_FILE = ENV_PREFIX + "CONFIG"
OF_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)=.*|\w+_PORT=\w+://.*")
"""Variables, ``NAME=VALUE``, that Kubernetes sets in containers if a Service has a name that begins with kvferryd."""

MAX_RULES = 1000  # Each call of a caller whose roles are limited looks at all rules


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
    of_types: dict[Any, str] = {float: "SECONDS", int: "N", ByteSize: "SIZE"}
    group: Any = parser
    for name, field in NodeConfig.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        default = "none" if field.default in (None, "") else "no" if field.default is False else field.default
        of_type = of_types.get(field.annotation, "FILE")
        metavar = next((each for each in field.metadata if isinstance(each, str)), of_type)
        options: dict[str, Any] = {"metavar": metavar}
        if field.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        text = f"{field.description} [{default}; {ENV_PREFIX}{name.upper()}]".replace("%", "%%")
        group.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, help=text, **options)


def load(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """Load the settings from the flags that were given, the environment and a TOML file. Raises `BadConfig`."""
    in_file = _read_file(file) if file is not None else {}
    given = {name.upper(): value for name, value in os.environ.items()}
    variables = {name: ENV_PREFIX + name.upper() for name in NodeConfig.model_fields}
    environment = {name: given[variable] for name, variable in variables.items() if variable in given}
    origins = {
        **dict.fromkeys(NodeConfig.model_fields, "default"),
        **dict.fromkeys(in_file, str(file)),
        **{name: variables[name] for name in environment},
        **{name: _flag(name) for name in flags},
    }
    return Loaded(_validated({**in_file, **environment, **flags}, origins), origins)


def configure(**settings: Any) -> NodeConfig:
    """Return the settings of an embedded server: the given ones, otherwise defaults. Raises `BadConfig`."""
    return _validated(settings, dict.fromkeys(settings, "the caller"))


def config_file(flag: str | None) -> Path | None:
    """Return the TOML file that ``--config`` names, else the file that ``KVFERRYD_CONFIG`` names, else None."""
    name = flag if flag is not None else os.environ.get(CONFIG_FILE, "")
    return Path(name) if name else None


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence, without its value, for each variable that is probably meant for kvferryd, but not read."""
    known = {ENV_PREFIX + name.upper() for name in NodeConfig.model_fields} | {CONFIG_FILE}
    # The names of settings may have any case.
    given = {name.upper() for name in environment}
    lines = []
    for name, value in sorted(environment.items()):
        upper = name.upper()
        # Clients' prefix, which was once kvferryd's, too.
        meant = upper.replace("KVFERRY_", ENV_PREFIX, 1)
        if meant != upper and meant in known - given:
            lines.append(f"kvferryd does not read {name}; the name of its variable is {meant}")
        elif upper.startswith(ENV_PREFIX) and upper not in known and not OF_KUBERNETES.fullmatch(f"{upper}={value}"):
            close = difflib.get_close_matches(upper, known, n=1, cutoff=0.8)
            lines.append(f"nothing reads the variable {name}" + (f"; did you mean {close[0]}?" if close else ""))
    return lines


def _validated(values: Mapping[str, Any], origins: Mapping[str, str]) -> NodeConfig:
    """Raises `BadConfig`, which explains each wrong setting."""
    try:
        return NodeConfig(**values)
    except ValidationError as error:
        wrong = error.errors()
    lines: list[str] = []
    found: dict[str, Any] = {}
    for detail in wrong:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidField):
            name, problem = cause.values["field"], f"expected {cause.values['expected']}"
        else:
            name = str(detail["loc"][0]) if detail["loc"] else "configuration"
            problem = detail["msg"][0].lower() + detail["msg"][1:]
        if detail["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, NodeConfig.model_fields, n=1)
            problem = "no such setting" + (f"; did you mean {close[0]}?" if close else "")
        default = NodeConfig.model_fields[name].default if name in NodeConfig.model_fields else None
        value, origin = shown(values.get(name, default)), origins.get(name, "default")
        lines.append(f"{name} is {value!r} (from {origin}): {problem}")
        found = found or {"setting": name, "value": str(value), "origin": origin, "problem": problem}
    raise BadConfig("\n".join(lines), **found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text())
    except OSError as error:
        problem = f"{path}: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"{path}: {error}"
    raise BadConfig(problem, setting="config", value=path, origin="--config", problem=problem)


def file_problems(loaded: Loaded) -> list[str]:
    """Return a line for each unusable file: the setting, its value and origin, and the expected value."""
    tls, policy = loaded.config.tls, loaded.config.policy
    checks: list[Callable[[], object]] = []
    if tls is not None:
        checks.append(lambda: _check_tls(tls))
    if policy is not None:
        checks.append(lambda: read_policy(policy))
    lines = []
    for check in checks:
        try:
            check()
        except InvalidField as error:
            name, value, expected = (error.values[key] for key in ("field", "value", "expected"))
            lines.append(f"{name} is {value} (from {loaded.origins[name]}): expected {expected}")
    return lines


def _check_tls(tls: TlsConfig) -> None:
    read_tls(tls)
    check_in_time(tls, time.time())


def memory_problems(loaded: Loaded) -> list[str]:
    """Return a line if the settings let the process take more memory than it may have: the kernel would kill it."""
    config, limit = loaded.config, memory_limit()
    needed = config.home_memory + WORKING_MEMORY
    if needed <= limit:
        return []
    return [
        f"memory is {config.home_memory >> 20} MiB (from {loaded.origins['memory']}): with {WORKING_MEMORY >> 20} MiB "
        f"for what it works on, kvferryd may take {needed >> 20} MiB, and its cgroup or host lets it have "
        f"{limit >> 20} MiB"
    ]


def _can_fit_a_name(pattern: str) -> str:
    if pattern.partition(":")[0].upper() in ("DNS", "URI"):
        raise ValueError(f"{pattern!r} has openssl's prefix: write the name alone")
    if not pattern.isascii():
        raise ValueError(f"{pattern!r}: names in certificates are ASCII: write an international one as xn--…")
    parts = pattern.split("/" if ":" in pattern else ".")
    if sum(ANYBODY in part for part in parts) > 1 or any(ANYBODY in part and part != ANYBODY for part in parts):
        raise ValueError(f"{pattern!r}: ** may stand once, as a whole part of the name")
    return pattern


_Pattern: TypeAlias = Annotated[str, Field(min_length=1)]  # An empty one would fit nothing


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    identities: list[Annotated[_Pattern, AfterValidator(_can_fit_a_name)]] = Field(min_length=1)
    engine: list[_Pattern] = []
    reader: list[_Pattern] = []
    relay: list[_Pattern] = []
    observer: bool = False
    admin: bool = False

    def rule(self) -> Rule:
        observer, admin = (EVERY,) * self.observer, (EVERY,) * self.admin
        grant = Grant(tuple(self.engine), tuple(self.reader), tuple(self.relay), observer, admin)
        return Rule(tuple(self.identities), grant)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    # A file without rules would refuse every caller: more likely it is still being written.
    rule: list[_Rule] = Field(min_length=1, max_length=MAX_RULES)


def read_policy(path: Path) -> Policy:
    """Read a policy file. An identity that no rule matches may do nothing. Raises `InvalidField`, of the setting
    `policy`, if the file cannot be read, is not TOML, or is not a valid policy."""
    try:
        found = _File.model_validate(parse_toml(path.read_text()))
    except OSError as error:
        raise InvalidField("policy", str(path), f"a readable file ({error.strerror})") from None
    except ValidationError as error:
        problems = error.errors()
        # A missing field comes first, but often its name is only misspelt: the unknown field tells the operator more.
        detail = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
        where = ".".join(str(part + 1) if isinstance(part, int) else part for part in detail["loc"])
        problem = "no such field" if detail["type"] == "extra_forbidden" else detail["msg"]
        raise InvalidField("policy", str(path), f"a policy; {where}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidField("policy", str(path), f"a policy in TOML ({error})") from None
    return Policy(everyone=Grant(), rules=tuple(rule.rule() for rule in found.rule))
