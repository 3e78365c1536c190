"""Follows a request through the house by annotations: from functions to those that they name, while these take or
return one of its forms.

What an expression is, is read from annotations alone: of parameters, of what is returned, of attributes, and of what
`__init__` is given. It need not see everything, only enough to get from one end to the other.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

Function = types.FunctionType


def leaves(annotation: Any) -> Iterator[Any]:
    """The classes that an annotation is made of. A tuple of several things, a mapping and Any are named as such."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and not (len(args) == 2 and args[1] is ...):
        yield tuple
    elif isinstance(origin, type) and issubclass(origin, typing.Mapping):  # type: ignore[arg-type]
        yield dict
    if origin is None:
        yield annotation
    for arg in args:
        yield from leaves(args[0] if arg is ... else arg) if not isinstance(arg, list) else _all_leaves(arg)


def _all_leaves(annotations: Iterable[Any]) -> Iterator[Any]:
    for annotation in annotations:
        yield from leaves(annotation)


@cache
def names(module: str) -> dict[str, Any]:
    """Return what a module's names stand for, those too that it imports for type checkers alone."""
    found = importlib.import_module(module)
    package = module if hasattr(found, "__path__") else module.rpartition(".")[0]
    known: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(found))):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            source = importlib.import_module("." * node.level + (node.module or ""), package if node.level else None)
            known |= {alias.asname or alias.name: getattr(source, alias.name, None) for alias in node.names}
    return known | vars(found)


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: _evaluated(text, function.__module__) for name, text in function.__annotations__.items()}


def _evaluated(text: Any, module: str) -> Any:
    return _meant(text, module) if isinstance(text, str) else text


@cache
def _meant(text: str, module: str) -> Any:
    return eval(text, dict(names(module)))  # noqa: S307


@cache
def _functions(module: str) -> dict[int, ast.AST]:
    """A module's functions by the line that they begin at, with their decorators."""
    found = ast.walk(ast.parse(inspect.getsource(importlib.import_module(module))))
    defined = [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in defined}


class Followed:
    """One function on the way, or a method of `owner`."""

    def __init__(self, function: Function, owner: type | None) -> None:
        self.function, self.owner = function, owner
        self.annotations = annotations(function)

    @property
    def tree(self) -> ast.AST:
        return _functions(self.function.__module__)[self.function.__code__.co_firstlineno]

    def called(self) -> Iterator[Followed]:
        """All functions and methods that this one names, as far as annotations tell."""
        scope = self._scope()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                found = _meaning(node, scope, self.function.__module__)
                if isinstance(found, Followed):
                    yield found

    def _scope(self) -> dict[str, Any]:
        """Return what the local names are: classes, and functions as `Followed`."""
        scope: dict[str, Any] = {name: _one_class(each) for name, each in self.annotations.items() if name != "return"}
        if self.owner is not None:
            scope["self"] = self.owner
        for node in ast.walk(self.tree):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                pairs = [(node.optional_vars, node.context_expr)]
            for target, value in pairs:
                if isinstance(target, ast.Name):
                    scope[target.id] = _meaning(value, scope, self.function.__module__)
        return scope


def _meaning(node: ast.expr, scope: dict[str, Any], module: str) -> Any:
    """The class that an expression is an instance of (or is itself), or the function that it names, or None."""
    if isinstance(node, ast.Await):
        return _meaning(node.value, scope, module)
    if isinstance(node, ast.Name):
        found = scope[node.id] if node.id in scope else names(module).get(node.id)
        return Followed(found, None) if isinstance(found, Function) and _is_ours(found) else found
    if isinstance(node, ast.Attribute):
        owner = _meaning(node.value, scope, module)
        return attribute(owner, node.attr) if isinstance(owner, type) else None
    if isinstance(node, ast.Call):
        made = _meaning(node.func, scope, module)
        return _one_class(made.annotations.get("return")) if isinstance(made, Followed) else made
    return None


@cache
def attribute(owner: type, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, property):
        return _one_class(annotations(found.fget).get("return")) if found.fget is not None else None
    if isinstance(found, staticmethod):
        found = found.__func__
    if isinstance(found, Function):
        return Followed(inspect.unwrap(found), owner) if _is_ours(found) else None
    for base in owner.__mro__:
        if _is_ours(base) and name in vars(base).get("__annotations__", {}):
            return _one_class(_evaluated(vars(base)["__annotations__"][name], base.__module__))
        if _is_ours(base) and "__init__" in vars(base) and not is_dataclass(base):
            init = Followed(vars(base)["__init__"], None)
            for node in ast.walk(init.tree):
                if isinstance(node, ast.AnnAssign) and _is_self(node.target, name):
                    return _one_class(_evaluated(ast.unparse(node.annotation), base.__module__))
                if isinstance(node, ast.Assign):
                    value = next((node.value for target in node.targets if _is_self(target, name)), None)
                    for target in node.targets if value is None else ():
                        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                            pairs = zip(target.elts, node.value.elts, strict=False)
                            value = next((each for part, each in pairs if _is_self(part, name)), None)
                    if value is not None:
                        return _replica_method(value) or _meaning(value, init._scope(), base.__module__)
    return None


def _replica_method(value: ast.expr) -> Followed | None:
    """Return what `pools.method("name")` is at the other end of Serve."""
    from motley.replicas.replica import Replica

    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "method":
        assert isinstance(value.args[0], ast.Constant)
        return Followed(vars(Replica)[value.args[0].value], Replica)
    return None


def _is_self(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == name and ast.unparse(target.value) == "self"


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("motley.")


def _one_class(annotation: Any) -> Any:
    """The only class of ours in an annotation, whatever it is wrapped in."""
    found = {each for each in leaves(annotation) if isinstance(each, type) and _is_ours(each)}
    return found.pop() if len(found) == 1 else None
