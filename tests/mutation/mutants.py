"""The mutants of a file: each is the file with one changed decision.

Not mutated: type annotations, docstrings, what only makes a text (f-strings, `__str__`, the arguments of what is
raised or logged), and the defaults and fields of dataclasses.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
NOT_MUTATED = frozenset(
    {"annotation", "returns", "decorator_list", "bases", "keywords", "defaults", "kw_defaults", "cause"}
)
"""Fields of nodes."""
TEXT_ONLY = frozenset({"__str__", "__repr__"})
LOGGING = frozenset({"debug", "info", "warning", "exception"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file with one difference.

    Attributes:
        where: class and function.
        line: of the difference in the original.
        before, after: the smallest piece of code that differs.
    """

    where: str
    line: int
    before: str
    after: str
    _original: ast.Module
    _path: Path
    _changed: ast.AST

    @property
    def source(self) -> str:
        """The whole file. Takes some milliseconds."""
        mutated = copy.deepcopy(self._original)
        _put(mutated, self._path, self._changed)
        return ast.unparse(ast.fix_missing_locations(mutated))

    @property
    def name(self) -> str:
        """The same in every version of the file that has this code."""
        return f"{self.where}: {self.before} -> {self.after}"


Path = tuple[tuple[str, int | None], ...]


def mutants(source: str) -> list[Mutant]:
    """All mutants of a file's source, in the order of its lines."""
    tree = ast.parse(source)
    found = []
    for path, where in _places(tree):
        node = _at(tree, path)
        for changed in _changes(node):
            # Two equal arguments in each other's place are no change.
            if ast.unparse(node) != ast.unparse(changed):
                line = getattr(node, "lineno", 0)
                found.append(Mutant(where, line, _shown(node), _shown(changed), tree, path, changed))
    return sorted(found, key=lambda mutant: mutant.line)


def _shown(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:120]


def _places(node: ast.AST, path: Path = (), where: str = "module") -> Iterator[tuple[Path, str]]:
    """Every node that may be changed: the way to it, and the function that it is in."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if node.name in TEXT_ONLY:
            return
        where = node.name if where == "module" else f"{where}.{node.name}"
    if path and where != "module":
        yield path, where
    for name, value in ast.iter_fields(node):
        if name in NOT_MUTATED and not (name == "keywords" and isinstance(node, ast.Call)):
            continue
        if isinstance(value, ast.AST):
            if not _text(node, name):
                yield from _places(value, (*path, (name, None)), where)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST) and not _text(item, ""):
                    yield from _places(item, (*path, (name, index)), where)


def _text(node: ast.AST, field: str) -> bool:
    """Whether this part of the code only makes a text or a declaration."""
    if isinstance(node, ast.Raise):
        # The raise itself may be left out, what it raises is not changed.
        return field == "exc"
    if isinstance(node, (ast.JoinedStr, ast.AnnAssign)):
        return isinstance(node, ast.JoinedStr) or (field == "" and not isinstance(node.target, ast.Attribute))
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _logs(node))


def _logs(node: ast.Expr) -> bool:
    call = node.value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                changed = copy.deepcopy(node)
                changed.ops[index] = other()
                yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        for left_out in range(len(node.values)):
            rest = [value for index, value in enumerate(node.values) if index != left_out]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, (ast.If, ast.While)):
        otherwise = copy.deepcopy(node)
        otherwise.test = ast.UnaryOp(ast.Not(), otherwise.test)
        yield otherwise
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif _may_go(node):
        yield ast.Pass()


def _may_go(node: ast.AST) -> bool:
    """Whether the file still makes sense without this statement."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.Raise, ast.AugAssign, ast.Delete, ast.Continue, ast.Break))


def _constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
        if node.value:
            yield ast.Constant(node.value - 1)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in OTHER_NAMES:
        yield ast.Call(ast.Name(OTHER_NAMES[name], ast.Load()), node.args, node.keywords)
    elif attribute in OTHER_NAMES and isinstance(node.func, ast.Attribute):
        func = ast.Attribute(node.func.value, OTHER_NAMES[attribute], ast.Load())
        yield ast.Call(func, node.args, node.keywords)
    elif len(node.args) > 1 and name not in ("isinstance", "getattr", "range"):
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)


def _at(node: ast.AST, path: Path) -> ast.AST:
    found: ast.AST = node
    for name, index in path:
        value = getattr(found, name)
        found = value if index is None else value[index]
    return found


def _put(tree: ast.AST, path: Path, changed: ast.AST) -> None:
    parent, (name, index) = _at(tree, path[:-1]), path[-1]
    if index is None:
        setattr(parent, name, changed)
    else:
        getattr(parent, name)[index] = changed
