"""Writes docs/errors.md from the reasons of protos/ and the exceptions of kvferry.errors.

python -m scripts.errors_page          # write it
python -m scripts.errors_page --check  # fail if it is not current

A reason's comment is ``CODE[ with RetryInfo]: meaning [Metadata: …] Next step: …``. Exceptions that have no reason say
the same in their docstrings.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry import errors
from scripts import rpc_reference

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"

COMMENT = re.compile(
    r"(?P<code>[A-Z_]+)(?P<paused> with RetryInfo)?: (?P<meaning>.+?)"
    r"(?: Metadata: .+?)? Next step: (?P<next>.+)"
)
DOCSTRING = re.compile(r"(?P<meaning>.+?)(?: Values: .+?)? Next step: (?P<next>.+)")

INTRODUCTION = """\
# Errors

What each error means, and what to do next. `make errors` writes this page from
[`errors.proto`](../protos/kvferry/v1/errors.proto) and [`kvferry.errors`](reference/errors.md), which also name each
error's values. Repeat the same call only where an entry says so.

- **In Python** an error is an exception of `kvferry.errors`, with `.reason`, `.values`, `.retryable` and
  `.retry_after`.
- **In other languages** it is a gRPC status with a `google.rpc.ErrorInfo`, which has the reason and the values, and a
  `google.rpc.RetryInfo` where there is a pause ([how to read them](routers.md#other-languages)).

"Compute the request" means that decode computes the prompt itself. vLLM does so with
`"kv_load_failure_policy": "recompute"`."""

BASES = """\
Classes from which others derive ({bases}) stand for what no other class fits, such as a reason of a later version: read
the message, and the log of the node server that it names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the page says about one error.

    Attributes:
        title: the reason, or the name of the class if it has none.
        cls: the exception.
        code: name of the gRPC status code.
        repeat: when to repeat the call; empty: never.
        meaning: what it means.
        next_step: what to do.
    """

    title: str
    cls: type[errors.KvferryError]
    code: str
    repeat: str
    meaning: str
    next_step: str


def of_the_contract() -> Iterator[Entry]:
    """An entry for each reason of the proto, by name.

    Raises:
        ValueError: a comment has another form, or another code than the exception.
    """
    classes = {cls.reason: cls for cls in exceptions() if cls.reason}
    _, declared = rpc_reference.declarations((rpc_reference.PROTOS / "errors.proto").read_text())
    for value in sorted(declared[0].members, key=lambda member: member.name):
        reason = value.name
        if value.number == "0":
            continue
        found = COMMENT.fullmatch(" ".join(value.comment.split()))
        if found is None or classes[reason].code != found["code"]:
            raise ValueError(
                f"{value.name}: the comment is not 'CODE: meaning. Next step: …' with the exception's code"
            )
        repeat = "repeat it after its pause" if found["paused"] else _repeat(found["code"])
        yield Entry(
            reason,
            classes[reason],
            found["code"],
            repeat,
            _sentence(found["meaning"]),
            _sentence(found["next"]),
        )


def of_python() -> Iterator[Entry]:
    """An entry for each exception that has neither a reason nor derived exceptions, by name.

    Raises:
        ValueError: a docstring names no next step.
    """
    for cls in exceptions():
        if cls.reason or cls.__subclasses__():
            continue
        said, _, _ = (inspect.getdoc(cls) or "").partition("\n\nAttributes:")
        found = DOCSTRING.fullmatch(" ".join(said.split()))
        if found is None:
            raise ValueError(f"{cls.__name__}: the docstring is not 'meaning. Next step: …'")
        yield Entry(
            cls.__name__,
            cls,
            cls.code,
            _repeat(cls.code),
            found["meaning"],
            _sentence(found["next"]),
        )


def exceptions() -> list[type[errors.KvferryError]]:
    """All exceptions, by name."""
    known = (vars(errors)[name] for name in errors.__all__)
    return [cls for cls in known if isinstance(cls, type) and issubclass(cls, errors.KvferryError)]


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Reasons", "Given by node servers and readers."]
    parts += [_entry(entry) for entry in of_the_contract()]
    parts += ["## Exceptions without a reason", "They arise in the process that raises them, and never cross the wire."]
    parts += [_entry(entry) for entry in of_python()]
    bases = [f"`{cls.__name__}`" for cls in exceptions() if not cls.reason and cls.__subclasses__()]
    parts.append(BASES.format(bases=", ".join(bases)))
    return "\n\n".join(parts) + "\n"


def _entry(entry: Entry) -> str:
    said = [f"`{entry.cls.__name__}`", entry.code] if entry.cls.reason else []
    said += [entry.repeat] if entry.repeat else []
    lines = [f"### {entry.title}", " · ".join(said), entry.meaning, f"**Next step:** {entry.next_step}"]
    return "\n\n".join(filter(None, lines))


def _repeat(code: str) -> str:
    return "repeat it" if code == "UNAVAILABLE" else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] if text[0].isalpha() else text


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() == page():
            return 0
        print("docs/errors.md is not current: make errors", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
