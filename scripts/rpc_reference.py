"""The RPC reference: a page of Markdown made from the comments of protos/.

    python scripts/rpc_reference.py

writes it to standard output. The documentation's build has it as ``reference/rpc.md`` (see docs_site.py). It reads the
protos as buf lints them here: a comment above every service, method, message, field and enum value, one declaration a
line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PROTOS = Path(__file__).parents[1] / "protos" / "kvferry" / "v1"
FILES = ("kv_transfer", "introspection", "admin", "geometry", "errors")

METHOD = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\) \{")
FIELD = re.compile(r"(repeated |optional )?(map<[^>]+>|[\w.]+) (\w+) = (\d+)(?: \[deprecated = true\])?;")
VALUE = re.compile(r"(\w+) = (\d+);")


@dataclass
class Declaration:
    """A service, message or enum, or a line in one of them.

    Attributes:
        kind: ``service``, ``message``, ``enum``, ``rpc``, ``field`` or ``value``.
        name: without its package.
        comment: as paragraphs.
        type: a field's type, with ``repeated`` before it; a method's request and answer.
        number: of a field or value.
        oneof: the oneof that a field belongs to.
        members: of a service, message or enum, in order.
    """

    kind: str
    name: str
    comment: str
    type: str = ""
    number: str = ""
    oneof: str = ""
    members: list[Declaration] = field(default_factory=list)


def declarations(text: str) -> tuple[str, list[Declaration]]:
    """A file's own comment, and what it declares.

    Raises:
        ValueError: a line that this parser does not know.
    """
    head, found, comment, oneof = "", list[Declaration](), list[str](), ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line[2:].removeprefix(" "))
            continue
        said, comment = "\n".join(comment), []
        if not line:
            continue
        if line.startswith("syntax"):
            head = said
        elif line.startswith(("package", "import", "option")):
            pass
        elif opened := re.fullmatch(r"(service|message|enum) (\w+) \{(\})?", line):
            found.append(Declaration(opened[1], opened[2], said))
        elif opened := re.fullmatch(r"oneof (\w+) \{", line):
            oneof = opened[1]
        elif line == "}":
            oneof = ""
        elif method := METHOD.fullmatch(line):
            arrow = f"{method[2] or ''}{method[3]} → {method[4] or ''}{method[5]}"
            found[-1].members.append(Declaration("rpc", method[1], said, arrow))
        elif value := VALUE.fullmatch(line):
            found[-1].members.append(Declaration("value", value[1], said, number=value[2]))
        elif member := FIELD.fullmatch(line):
            kind = f"{member[1] or ''}{member[2]}"
            found[-1].members.append(Declaration("field", member[3], said, kind, member[4], oneof))
        else:
            raise ValueError(f"unknown line in a proto: {line!r}")
    return head, found


def page() -> str:
    """The whole reference."""
    read = [declarations((PROTOS / f"{name}.proto").read_text()) for name in FILES]
    known = {declared.name for _, file in read for declared in file}
    parts = ["# RPC reference", "Made from the comments of the protos. All names are in the package `kvferry.v1`."]
    for name, (head, file) in zip(FILES, read, strict=True):
        parts += [f"## {name}.proto", _paragraphs(head)]
        for declared in file:
            parts += [f"### {declared.name}", _paragraphs(declared.comment)]
            if declared.kind == "service":
                for method in declared.members:
                    parts += [f"#### {method.name}", _linked(method.type, known), _paragraphs(method.comment)]
            elif declared.members:
                parts.append(_table(declared, known))
    return "\n\n".join(parts) + "\n"


def _table(declared: Declaration, known: set[str]) -> str:
    if declared.kind == "enum":
        lines = ["| value | number | |", "|---|---:|---|"]
        lines += [f"| `{value.name}` | {value.number} | {_cell(value.comment)} |" for value in declared.members]
        return "\n".join(lines)
    lines = ["| field | type | number | |", "|---|---|---:|---|"]
    for member in declared.members:
        either = f"One of `{member.oneof}`. " if member.oneof else ""
        lines.append(
            f"| `{member.name}` | {_linked(member.type, known)} | {member.number} | {either}{_cell(member.comment)} |"
        )
    return "\n".join(lines)


def _linked(kind: str, known: set[str]) -> str:
    """A type, with links to what is described on the page."""
    return re.sub(
        r"[A-Za-z_][\w.]*",
        lambda word: f"[{word[0]}](#{word[0].lower()})" if word[0] in known else word[0],
        kind.replace("<", "&lt;").replace(">", "&gt;"),
    )


def _paragraphs(comment: str) -> str:
    """A comment as Markdown: its own line breaks mean nothing but before the items of a list."""
    text = re.sub(r"\n ?- ", "\n- ", comment)
    return re.sub(r"(?<!\n)\n(?=- )", "\n\n", text, count=1).replace("<", "&lt;")


def _cell(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
