"""Private parts of Ray are named in cluster/ray_compat alone, where each has a test: so the next one goes there too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve._private.controller import ServeController

ROOT = Path(__file__).resolve().parents[1]
OURS = (
    "cluster/**/*.py", "kernels/**/*.py", "replicas/**/*.py", "src/motley/*.py", "src/motley/cli/**/*.py",
    "src/motley/client/**/*.py", "loadtests/**/*.py", "tools/**/*.py",
)  # fmt: skip
HOME = ROOT / "cluster" / "ray_compat"
# Modules of Ray without an underscore that are no public interface.
CLOSED = (
    "ray.autoscaler", "ray.core", "ray.dashboard", "ray.experimental", "ray.internal", "ray.scripts",
    "ray.serve.context", "ray.serve.generated",
)  # fmt: skip
# Texts of Ray's: modules, variables, titles of processes, files, Serve's own paths, and names that Serve calls.
TEXT = re.compile(
    rf"\bray(?:\.\w+)*\._\w|{'|'.join(map(re.escape, CLOSED))}|\b_internal_kv|\bRAY_[A-Za-z]|\bray::|\bServeReplica"
    r"|\bSERVE_[A-Z]|\bsession_latest|\bdefault_worker\.py|/-/|\bRayServeAPIService|__serve_|__ray_|x-request-disconnect-|_raylet\b"
)
IMPORTS_RAY = re.compile(r"^\s*(?:from|import)\b.*\b(?:ray|cluster)\b", re.MULTILINE)
Nodes = list[ast.AST]  # of a module or a class
CONTROLLER_METHODS = {name for name in vars(ServeController) if not name.startswith("_")}
# Private attributes of others than Ray: of named tuples, os, redis-py and grpcio.
OTHERS = {"_replace", "_exit", "_sock", "_method_handlers"}


def sources() -> list[Path]:
    found = {path for pattern in OURS for path in ROOT.glob(pattern) if "_pb2" not in path.name}
    return sorted(path for path in found if HOME not in path.parents)


def offences(source: str, *, near_ray: bool = True) -> Iterator[str]:
    """Lines that name a private part of Ray, with what they name. near_ray: the module may get objects of Ray's."""
    tree = list(ast.walk(ast.parse(source)))
    yield from (f"line {line}: imports {name}" for line, name in imported(tree) if is_private(name))
    yield from (f"line {line}: says {text!r}" for line, text in texts(tree) if TEXT.search(text))
    roots = foreign_roots(tree)
    yield from (f"line {line}: replaces {name}" for line, name in replaced(tree, roots))
    if near_ray:
        yield from (f"line {line}: takes {name}" for line, name in attributes(tree))
        yield from (f"line {line}: asks Serve's controller for {name}" for line, name in asked(tree))
        for kind in tree:
            if isinstance(kind, ast.ClassDef) and roots.intersection(map(root, kind.bases)):
                yield from (f"line {line}: takes {name} of its base" for line, name in inherited(kind))


def imported(tree: Nodes) -> Iterator[tuple[int, str]]:
    """Each name that is imported, in full."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_private(name: str) -> bool:
    parts = name.split(".")
    under = any(name == closed or name.startswith(f"{closed}.") for closed in CLOSED)
    return parts[0] == "ray" and (under or any(part.startswith("_") for part in parts))


def foreign_roots(tree: Nodes) -> set[str]:
    """Names by which a module has what it imports from Ray or from ray_compat."""
    found = {"ray"}
    for node in tree:
        if isinstance(node, ast.ImportFrom) and {"ray", "ray_compat"} & set((node.module or "").split(".")):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("ray.")}
    return found


def root(expression: ast.expr) -> str:
    """The name with which a dotted expression begins."""
    return ast.unparse(expression).split(".")[0]


def texts(tree: Nodes) -> Iterator[tuple[int, str]]:
    """String constants, those in formatted strings and bytes too, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in tree
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in tree:
        if isinstance(node, ast.Constant) and id(node) not in docs:
            if isinstance(node.value, str):
                yield node.lineno, node.value
            elif isinstance(node.value, bytes):
                yield node.lineno, node.value.decode("latin-1")


def attributes(tree: Nodes) -> Iterator[tuple[int, str]]:
    """Private attributes and arguments of what is neither `self` nor a class or a name of the module itself."""
    own = {node.name for node in tree if isinstance(node, ast.ClassDef)} | {"self", "cls", "super()"}
    defined = assigned(tree)
    for node in tree:
        if isinstance(node, ast.Attribute) and hidden(node.attr) and ast.unparse(node.value) not in own:
            if node.attr not in OTHERS | defined:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, f"{each.arg}=") for each in node.keywords if each.arg and hidden(each.arg))
            if ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
                given = node.args[1]
                if isinstance(given, ast.Constant) and hidden(str(given.value)):
                    yield node.lineno, ast.unparse(node)


def replaced(tree: Nodes, roots: set[str]) -> Iterator[tuple[int, str]]:
    """Attributes of Ray's modules and classes that are set."""
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) in roots:
            yield node.lineno, ast.unparse(node)


def asked(tree: Nodes) -> Iterator[tuple[int, str]]:
    """Methods of Serve's controller that are called as an actor's."""
    called = (node.value for node in tree if isinstance(node, ast.Attribute) and node.attr == "remote")
    for method in called:
        if isinstance(method, ast.Attribute) and method.attr in CONTROLLER_METHODS:
            yield method.lineno, method.attr


def inherited(kind: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Private attributes of `self` that a class has not made: they are its base's. Those of `super()` are, too."""
    inside = list(ast.walk(kind))
    made = assigned(inside)
    for node in inside:
        if isinstance(node, ast.Attribute) and hidden(node.attr):
            owner = ast.unparse(node.value)
            if owner == "super()" or (owner == "self" and node.attr not in made):
                yield node.lineno, ast.unparse(node)


def assigned(tree: Nodes) -> set[str]:
    """Names of functions and of attributes of `self` that are made here."""
    found = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_near_ray(path: Path, source: str) -> bool:
    """Whether a module is of the cluster or imports it, or Ray: the kernels and replicas have nothing of Ray's."""
    return path.relative_to(ROOT).parts[0] == "cluster" or IMPORTS_RAY.search(source) is not None


def offences_of(path: Path) -> Iterator[str]:
    source = path.read_text()
    near_ray = is_near_ray(path, source)
    if near_ray or TEXT.search(source):  # parsing takes time
        yield from (f"{path.relative_to(ROOT)}, {each}" for each in offences(source, near_ray=near_ray))


@pytest.mark.slow("Parses every module and looks at its names and texts")
def test_nothing_private_of_rays_is_named_but_in_its_place() -> None:
    """cluster/ray_compat/__init__.py says where it goes; it wants a test in tests/cluster/test_ray_compat*.py."""
    assert [each for path in sources() for each in offences_of(path)] == []


def test_modules_of_all_packages_are_searched() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in sources()}
    assert {"cluster", "kernels", "replicas", "src", "tools"} <= found
    assert any(HOME in path.parents for path in ROOT.glob(OURS[0]))


GUILTY = (
    "import ray._private.worker",
    "from ray._private import worker",
    "from ray.serve import _private",
    "from ray.serve.context import serve",
    "from ray.core.generated import gcs_pb2",
    "import importlib\nimportlib.import_module('ray._raylet')",
    "CODE = 'import ray; ray._private.state'",
    "x = ray._private.state.nodes()",
    "run([python, '-c', f'from ray.serve.generated import {name}'])",
    "os.environ['RAY_SERVE_LOG_TO_STDERR'] = '0'",
    "x = f'{folder}/session_latest/logs'",
    "title = b'ray::IDLE'",
    "path = '/-/healthz'",
    "handle.options(_by_reference=False)",
    "from ray import serve\nserve._run(app)",
    "x = client._controller",
    "x = getattr(response, '_replica_result_future', None)",
    "from ray.serve import schema\nschema.Details = Ours",
    "import ray\nray.util.placement = ours",
    "controller.get_deployment_info.remote(name)",
    "from ray.serve.request_router import Theirs\nclass Ours(Theirs):\n  def f(self):\n    self._deployment_id",
    "from .ray_compat.haproxy_control import Theirs\nclass Ours(Theirs):\n  def f(self):\n    super()._reload()",
)
INNOCENT = (
    '"""Serve answers /-/healthz; RAY_AUTH_MODE is Ray\'s."""',
    "import ray\nfrom ray import serve\nray.init(address='auto')\nserve.start()",
    "from ray.serve.schema import LoggingConfig",
    "log = logging.getLogger('ray.serve')",
    "message._replace(a=1)\nos._exit(1)",
    "class A:\n  def f(self):\n    self._x = 1\n    return A._y, other._x",
    "from ray.serve import B\nclass A(B):\n  _z = 1\n  def _f(self):\n    self._x = self._z\n    self._f()",
    "actor.ready.remote()\narray.x = 1",
)


@pytest.mark.parametrize("source", GUILTY)
def test_the_search_finds_a_planted_offence(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize("source", INNOCENT)
def test_the_search_lets_others_pass(source: str) -> None:
    assert list(offences(source)) == []


def test_classes_of_ours_override_nothing_private_of_rays() -> None:
    """Their bases in ray_compat do. A name that both have by chance would be called by Ray."""
    from motley.cluster.routing.serve_router import PoolRouter
    from motley.cluster.security.edge.haproxy_manager import HAProxyManager, SteadyHAProxy

    for kind in (PoolRouter, HAProxyManager, SteadyHAProxy):
        own = {name for name in vars(kind) if hidden(name)} - {"_abc_impl"}
        assert own
        assert not own & {name for base in kind.__mro__[1:] for name in vars(base)}, kind
