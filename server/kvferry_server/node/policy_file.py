"""The policy file, in TOML: rules that give roles to identities (see `kvferry_server.servicers.access`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvferry._directory.file import parse_toml
from kvferry.errors import InvalidField
from kvferry_server.servicers.access import ANYBODY, EVERY, Grant, Policy, Rule

MAX_RULES = 1000  # Each call of a caller whose roles are limited looks at all rules


def _can_fit_a_name(pattern: str) -> str:
    if pattern.partition(":")[0].upper() in ("DNS", "URI"):
        raise ValueError(f"{pattern!r} has openssl's prefix: write the name alone")
    if not pattern.isascii():
        raise ValueError(f"{pattern!r}: names in certificates are ASCII: write an international one as xn--…")
    parts = pattern.split("/" if ":" in pattern else ".")
    if sum(ANYBODY in part for part in parts) > 1 or any(ANYBODY in part and part != ANYBODY for part in parts):
        raise ValueError(f"{pattern!r}: ** may stand once, as a whole part of the name")
    return pattern


# An empty pattern would fit nothing.
_Pattern: TypeAlias = Annotated[str, Field(min_length=1)]


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
        return Rule(
            tuple(self.identities), Grant(tuple(self.engine), tuple(self.reader), tuple(self.relay), observer, admin)
        )


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
