"""The places where a mutation can be made, and how one is found again after the code has moved."""

from __future__ import annotations

import ast
import copy
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FOLDERS = ("kernels", "launcher", "package", "runtime")
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
FLIPPED_CPP = {" < ": " <= ", " <= ": " < ", " == ": " != ", " + ": " - ", " && ": " || ", "true": "false"}
LOGGED = re.compile(r"(_?log|logger|logging)\.|(warnings\.)?warn\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one statement, named without a line number."""

    file: str
    function: str  # its qualified name; empty in C++
    operator: str
    statement: str  # as `ast.unparse` writes it, without the statements inside it
    occurrence: int  # among those of its function whose operator and statement are equal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Mutation:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a mutation is made in the tree as it is."""

    mutation: Mutation
    file: str
    start: int  # bytes from the file's begin
    end: int
    replacement: str

    def changed(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def sites(root: Path) -> list[Site]:
    """Return all places of the tracked files, in the order of their names."""
    return [site for file in _tracked(root) for site in _sites(root, file)]


def find(mutation: Mutation, root: Path) -> Site | None:
    """Return where the mutation is to be made: in its file, or where its function has moved, or nowhere."""
    tracked = _tracked(root)
    for file in sorted(tracked, key=lambda file: (file != mutation.file, file)):
        for site in _sites(root, file):
            here = site.mutation
            if (here.function, here.operator, here.statement, here.occurrence) == (
                *(mutation.function, mutation.operator, mutation.statement, mutation.occurrence),
            ):
                return site
    return None


def _tracked(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=root, capture_output=True, text=True, check=True
    )
    return [
        name
        for name in sorted(listed.stdout.splitlines())
        if name.endswith((".py", ".cpp")) and not (root / name).is_symlink()
    ]


def _sites(root: Path, file: str) -> Iterator[Site]:
    source = (root / file).read_bytes()
    if file.endswith(".cpp"):
        raw = _cpp_sites(source.decode())
    else:
        visitor = _Visitor(source)
        visitor.visit(ast.parse(source))
        raw = iter(visitor.places)
    counts: Counter[tuple[str, str, str]] = Counter()
    for function, operator, statement, (start, end), replacement in raw:
        counts[function, operator, statement] += 1
        mutation = Mutation(
            file=file,
            function=function,
            operator=operator,
            statement=statement,
            occurrence=counts[function, operator, statement],
        )
        yield Site(mutation=mutation, file=file, start=start, end=end, replacement=replacement)


_Place = tuple[str, str, str, tuple[int, int], str]  # function, operator, statement, bytes, replacement


def _cpp_sites(text: str) -> Iterator[_Place]:
    begin = 0
    for line in text.splitlines(keepends=True):
        code = line.partition("//")[0]
        if not re.match(r"\s*(#|\*|/\*|template)", code) and '"' not in code:
            for given, replacement in FLIPPED_CPP.items():
                for match in re.finditer(re.escape(given), code):
                    start = begin + len(code[: match.start()].encode())
                    place = (start, start + len(given.encode()))
                    yield "", f"{given.strip()} to {replacement.strip()}", line.strip(), place, replacement
        begin += len(line.encode())


class _Visitor(ast.NodeVisitor):
    """Collects the places in functions; texts of errors, log lines and types are no places."""

    def __init__(self, source: bytes) -> None:
        self.places: list[_Place] = []
        self._begins = [0]  # of each line, in bytes
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._names: list[str] = []
        self._functions = 0  # how many are around
        self._statement: ast.stmt | None = None

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr) or _is_for_types(node) or _is_logged(node):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check of what is equal anyway
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._visit_definition(node)
            return
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        if self._functions and self._statement is not None:
            for operator, place, replacement in _changes(node):
                span = (self._offset(place, end=False), self._offset(place, end=True))
                statement = _header(self._statement)
                self.places.append((".".join(self._names), operator, statement, span, replacement))
        for field, value in ast.iter_fields(node):
            if field != "annotation":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)
        self._statement = outer

    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        is_function = not isinstance(node, ast.ClassDef)
        self._names.append(node.name)
        self._functions += is_function
        for statement in node.body:
            self.visit(statement)
        self._functions -= is_function
        self._names.pop()

    def _offset(self, node: ast.expr | ast.stmt, *, end: bool) -> int:
        if end:
            return self._begins[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._begins[node.lineno - 1] + node.col_offset


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the operator, the node that is replaced, and what replaces it."""
    match node:
        case ast.Compare():
            for number, given in enumerate(node.ops):
                if flipped := FLIPPED.get(type(given)):
                    ops = [*node.ops[:number], flipped(), *node.ops[number + 1 :]]
                    yield "comparison flipped", node, _unparsed(node, ops=ops)
        case ast.BoolOp():
            swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or swapped", node, _unparsed(node, op=swapped)
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped", node, _unparsed(node.operand)
        case ast.BinOp(op=ast.Add()) if not _is_text(node.left) and not _is_text(node.right):
            yield "+ to -", node, _unparsed(node, op=ast.Sub())
        case ast.Constant(value=bool()):
            yield "True/False swapped", node, str(not node.value)
        case ast.Constant(value=int()):
            yield "constant + 1", node, str(int(str(node.value)) + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None", value, "None"
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "call deleted", node, "pass"
        case ast.If() if not any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test)):
            yield "condition False", node.test, "False"


def _unparsed(node: ast.expr, **replaced: object) -> str:
    changed = copy.copy(node)
    for name, value in replaced.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _header(statement: ast.stmt) -> str:
    bare = copy.copy(statement)
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        if hasattr(bare, name):
            setattr(bare, name, [])
    return ast.unparse(bare)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, int | float)
    )


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and LOGGED.match(ast.unparse(node)) is not None
