"""Errors about the arguments of a call."""

from __future__ import annotations

from kvferry.errors._base import KvferryError


class InvalidInput(KvferryError, ValueError):
    """An argument is wrong; repeating will not help.

    Next step: correct the argument that the message names.
    """

    code = "INVALID_ARGUMENT"


class InvalidField(InvalidInput):
    """A field is missing, malformed or out of range. Values: field, value, expected."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(
            f"{field} is {value!r}, expected {expected}", field=field, value=repr(value), expected=expected
        )


class DeadlineRequired(InvalidInput):
    """The call had no deadline."""

    reason = "DEADLINE_REQUIRED"


class BadGeometry(InvalidInput):
    """The geometry contradicts itself, or the ranks of an engine together lack units or tokens of a plane that they
    have. Values: where, problem."""

    reason = "BAD_GEOMETRY"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}", where=where, problem=problem)


class LayoutMismatch(InvalidInput):
    """An engine's bytes are not where its planes declare them. Values: layer, problem, and those of component, block,
    token, head, expected and found that are known; where bytes were compared, expected and found are hexadecimal.

    Next step: correct the planes or the spec of the layer that is named. With vLLM, use a version that docs/vllm.md
    lists, and report the message otherwise.
    """

    def __init__(
        self,
        layer: str,
        problem: str,
        *,
        component: str | None = None,
        block: int | None = None,
        token: int | None = None,
        head: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        compared = "" if expected is None else f": expected {expected}, found {found}"
        super().__init__(f"layer {layer}: {problem}{compared}", layer=layer, problem=problem)
        given = {
            "component": component,
            "block": block,
            "token": token,
            "head": head,
            "expected": expected,
            "found": found,
        }
        self.values.update({name: str(value) for name, value in given.items() if value is not None})


class BadReference(InvalidInput):
    """The string is not a reference. Values: problem."""

    reason = "BAD_REFERENCE"

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a kvferry reference: {problem}", problem=problem)


class BadBlock(InvalidInput):
    """The block may not be read or written. Values: group, side, block, num_blocks, problem."""

    reason = "BAD_BLOCK"

    def __init__(self, group: str, side: str, block: int, num_blocks: int, problem: str) -> None:
        super().__init__(
            f"group {group!r}, {side} block {block} of {num_blocks}: {problem}",
            group=group,
            side=side,
            block=block,
            num_blocks=num_blocks,
            problem=problem,
        )


class BlocksShort(InvalidInput):
    """The blocks of one side do not cover the tokens that were asked for. Values: group, side, asked, available."""

    reason = "BLOCKS_SHORT"
    code = "FAILED_PRECONDITION"

    def __init__(self, group: str, side: str, asked: str, available: str) -> None:
        super().__init__(
            f"group {group!r}: asked for {asked}, the {side} has {available}",
            group=group,
            side=side,
            asked=asked,
            available=available,
        )


class PartiesMismatch(InvalidInput):
    """The calls that belong to one read contradict each other. Values: lease_number, field, value, expected."""

    reason = "PARTIES_MISMATCH"
