"""Error codes that the sources raise, read from their syntax trees.

It understands calls of the error classes, and of a module's own functions and exceptions that pass their parameter
`code` on to one. A code that cannot be read so is an error, never left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from motley.cluster import request_errors, service_errors
from motley.replicas import errors as engine_errors
from motley.replicas.errors import MotleyError

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("cluster", "replicas")


def _family() -> Iterator[tuple[str, type[MotleyError]]]:
    for module in (engine_errors, request_errors, service_errors):
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, MotleyError) and value.__module__ == module.__name__:
                yield name, value


FAMILY: Mapping[str, type[MotleyError]] = dict(_family())


@dataclass(frozen=True, slots=True)
class RaisedError:
    """A code that is raised. `code`: None if the error has none. `kind`: a name of FAMILY. `folder`: such as
    cluster/web.
    """

    code: str | None
    kind: str
    folder: str


@dataclass(slots=True)
class _ErrorMaker:
    """A function or exception with a parameter `code`: the argument's position, its default, and what it raises."""

    position: int
    default: ast.expr | None
    kinds: set[str] = field(default_factory=set)


def raised_errors() -> set[RaisedError]:
    """Return the codes of all sources that a service runs."""
    return set().union(*raised_by_file().values())


@cache
def raised_by_file() -> Mapping[Path, set[RaisedError]]:
    """Return the codes of each file that a service runs, by its path below ROOT."""
    found: dict[Path, set[RaisedError]] = {}
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                found[inside] = raised_in(path.read_text(encoding="utf-8"), inside)
    return found


def raised_in(source: str, path: Path) -> set[RaisedError]:
    """Return the codes of one source. Raises ValueError, naming the line, if a code cannot be determined."""
    tree = ast.parse(source)
    makers = _makers(tree)
    own = {name: name for name in FAMILY} | _subclasses(tree)
    found: set[RaisedError] = set()
    for call in _calls(tree):
        name = _name(call)
        given = next((word.value for word in call.keywords if word.arg == "code"), None)
        if name in own:
            kinds, default = {own[name]}, ast.Constant(FAMILY[own[name]]("").code)
            codes = _codes(given or default, path)
        elif name in makers:
            maker = makers[name]
            kinds = maker.kinds
            at = call.args[maker.position] if 0 <= maker.position < len(call.args) else None
            codes = _codes(given or at or maker.default or ast.Constant(None), path)
        elif isinstance(given, ast.Constant) and isinstance(given.value, str):
            raise ValueError(f"{path}:{call.lineno}: {name} is given a code, and it is not told what it raises")
        else:
            continue
        found |= {RaisedError(code, kind, path.parent.as_posix()) for code in codes for kind in kinds}
    return found


def _codes(code: ast.expr, path: Path) -> set[str | None]:
    """Return the codes that an expression may be; none if it only passes a code on."""
    match code:
        case ast.Constant(value=str() | None as word):
            return {word}
        case ast.IfExp(body=one, orelse=other):
            return _codes(one, path) | _codes(other, path)
        case ast.Name(id="code") | ast.Attribute(attr="code"):
            return set()  # found where the maker is called, or where the other error was raised
    raise ValueError(f"{path}:{code.lineno}: the code {ast.unparse(code)!r} cannot be told")


def _subclasses(tree: ast.Module) -> dict[str, str]:
    """Return a module's own error classes, and the classes of FAMILY as which they are sent."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name not in FAMILY]
    bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for node in classes}
    return {name: base for name, above in bases.items() for base in above if base in FAMILY}


def _makers(tree: ast.Module) -> dict[str, _ErrorMaker]:
    makers: dict[str, _ErrorMaker] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__" and (maker := _maker(node)):
            maker.kinds = {_name(call) for call in _calls(node) if _name(call) in FAMILY and _hands_on(call, ast.Name)}
            makers[node.name] = maker
        elif isinstance(node, ast.ClassDef) and node.name not in FAMILY:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__" and (maker := _maker(inner)):
                    maker.position -= 1  # self
                    maker.kinds = {_name(c) for c in _calls(tree) if _name(c) in FAMILY and _hands_on(c, ast.Attribute)}
                    makers[node.name] = maker
    return makers


def _maker(function: ast.FunctionDef) -> _ErrorMaker | None:
    plain = [*function.args.posonlyargs, *function.args.args]
    for position, argument in enumerate(plain):
        if argument.arg == "code":
            late = position - len(plain) + len(function.args.defaults)
            return _ErrorMaker(position, function.args.defaults[late] if late >= 0 else None)
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if argument.arg == "code":
            return _ErrorMaker(-1, default)
    return None


def _hands_on(call: ast.Call, kind: type[ast.expr]) -> bool:
    """Return whether the call has `code=code`, or `code=another.code`."""
    return any(word.arg == "code" and isinstance(word.value, kind) for word in call.keywords)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
