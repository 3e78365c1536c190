"""The rules of the house that no linter checks."""

from __future__ import annotations

import ast
import builtins
import graphlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import grimp
import module_graph
import pytest

import motley

ROOT = Path(__file__).resolve().parents[1]
OURS = ("src/motley/*.py", "src/motley/cli/**/*.py", "kernels/**/*.py", "replicas/**/*.py", "cluster/**/*.py")
OURS += ("loadtests/**/*.py", "tools/**/*.py")
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "os.system"}


def _sources() -> list[Path]:
    return sorted(path for pattern in OURS for path in ROOT.glob(pattern) if "_pb2" not in path.name)


def _offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        yield from (f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in BANNED_MODULES)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS:
                yield f"line {node.lineno}: calls {called}"
            for keyword in node.keywords:
                given = (keyword.arg, ast.unparse(keyword.value))
                if given in {("trust_remote_code", "True"), ("shell", "True"), ("allow_pickle", "True")}:
                    yield f"line {node.lineno}: passes {given[0]}=True"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: catches everything"


def test_the_search_for_offences_finds_them() -> None:
    guilty = (
        "import pickle, json\nfrom joblib import load\neval('1')\ntorch.load('x')\nrun('x', shell=True)\n"
        "from .pickle import jar\ntry: f()\nexcept: pass\nmodel.eval()\nsafetensors.load('x')\n"
    )
    assert [offence.split(":")[0] for offence in sorted(_offences(guilty))] == [f"line {i}" for i in (1, 2, 3, 4, 5, 8)]


@pytest.mark.slow("Parses every module and writes out the name of each call")
@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_runs_code_from_data(path: Path) -> None:
    assert list(_offences(path.read_text())) == []


def _described_sources() -> list[Path]:
    return sorted([*_sources(), *ROOT.glob("src/motley/client/*.py"), *ROOT.glob("tests/**/*.py")])


HANGING = {"as", "likewise", "of", "that", "those", "what", "with"}  # words that lean on a sentence before them


@pytest.mark.parametrize("path", _described_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_docstring_begins_with_a_verb_or_a_noun(path: Path) -> None:
    """A docstring is read alone: in an editor, in the generated pages, or as the help of a command."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    assert [text for text in texts if re.match(r"\w*", text)[0].lower() in HANGING] == []  # type: ignore[index]


@pytest.mark.slow("Parses every module and looks at each of its nodes")
def test_no_two_classes_have_one_name() -> None:
    """Private ones too: a name that is searched for, in a log or by an editor, leads to one place."""
    places = defaultdict(list)
    for path in [*_sources(), *ROOT.glob("src/motley/client/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 900
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


SHARED_NAMES = {  # of files, with the reason
    "__init__.py": "Python's",
    "__main__.py": "Python's",
    "registry.py": "each kind of thing has a list of its own, beside what it lists",
    "generate.py": "the command `motley generate`, and what makes the gRPC code from the protos",
}
LOOSE_FILES = 8  # at the root of each package, beside its __init__.py


def test_no_two_files_have_one_name() -> None:
    places = defaultdict(list)
    for path in [*_sources(), *ROOT.glob("src/motley/client/*.py")]:
        places[path.name].append(str(path.relative_to(ROOT)))
    assert {name: at for name, at in places.items() if len(at) > 1 and name not in SHARED_NAMES} == {}
    assert [name for name in SHARED_NAMES if len(places[name]) < 2] == []


@pytest.mark.parametrize("package", ["kernels", "replicas", "cluster", "loadtests/motley_bench"])
def test_the_root_of_a_package_is_short(package: str) -> None:
    """Whoever opens a package sees its folders and what all of it shares."""
    loose = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(loose) <= LOOSE_FILES


RAISED = re.compile(r"[Rr]aises? ((?:(?:[\w.]+)(?:, (?:and |or )?| and | or ))*[\w.]+)")


def _unknown_errors(texts: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names with a capital that stand where a text says what is raised, and are no class of ours."""
    lists = (found[1] for text in texts for found in RAISED.finditer(" ".join(text.split())))
    return [name for names in lists for name in re.findall(r"(?<![\w.])_?[A-Z]\w+", names) if name not in known]


@pytest.mark.slow("Parses every module and looks at each of its nodes")
def test_each_error_that_a_docstring_names_exists() -> None:
    paths = [*_sources(), *ROOT.glob("src/motley/client/*.py")]
    nodes_of = {path: list(ast.walk(ast.parse(path.read_text()))) for path in paths}
    ours = {node.name for nodes in nodes_of.values() for node in nodes if isinstance(node, ast.ClassDef)}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, nodes in nodes_of.items():
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
        assert _unknown_errors(texts, ours | imported | set(dir(builtins))) == [], path.relative_to(ROOT)


def test_the_search_for_errors_finds_them() -> None:
    texts = ["Raises KeyError, Gone and _Lost.", "Raise Lost\n    if it is so", "Raises grpc.RpcError", "raised Lost"]
    assert _unknown_errors(texts, {"KeyError"}) == ["Gone", "_Lost", "Lost"]


FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*) {2,}\S", re.MULTILINE)  # a line of a list of fields or parameters
TABLES = ("_span", "_pairs")  # whose docstrings have tables of something else


def _unknown_fields(node: ast.AST, docstring: str) -> list[str]:
    """Return what a docstring lists as fields or parameters and the class or function has not; keys count as well."""
    known: set[object] = set()
    for each in ast.walk(node):
        match each:
            case ast.arg(arg=name) | ast.keyword(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Constant(value=name):
                known.add(name)
    rest = docstring.partition("\n\n")[2]
    return [name for found in FIELD.finditer(rest) for name in found[1].split(", ") if name not in known]


@pytest.mark.slow("Parses every module and looks at each of its nodes")
def test_each_field_that_a_docstring_lists_exists() -> None:
    """A parameter that is renamed would keep its old name there."""
    for path in [*_sources(), *ROOT.glob("src/motley/client/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in TABLES:
                unknown = _unknown_fields(node, ast.get_docstring(node) or "")
                assert unknown == [], f"{path.relative_to(ROOT)}: {node.name}"


def test_the_search_for_fields_finds_them() -> None:
    text = "def f(seconds, *, most): pass"
    said = "Wait.\n\nseconds   how long\nlimit     of it\na, most   both\n          and more"
    assert _unknown_fields(ast.parse(text), said) == ["limit", "a"]


def test_the_sources_are_found() -> None:
    found = {str(path.relative_to(ROOT)).split("/")[0] for path in _sources()}
    assert found == {"src", "kernels", "replicas", "cluster", "loadtests", "tools"}


def test_the_picture_of_all_modules_shows_the_imports_as_they_are() -> None:
    drawn = module_graph.draw(module_graph.read_imports())  # raises if an arrow would not point down
    assert drawn == module_graph.PICTURE.read_text(), "run `make graph`"


@pytest.mark.parametrize("package", ["motley", "motley_bench"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    """Neither of two modules that need each other can be read, tested or moved alone; imports for type checkers count
    too.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_picture_refuses_what_does_not_point_down() -> None:
    with pytest.raises(ValueError, match="cycle"):
        module_graph.draw({"motley.kernels.a": {"motley.kernels.b"}, "motley.kernels.b": {"motley.kernels.a"}})
    with pytest.raises(ValueError, match="which is above it"):
        module_graph.draw({"motley.kernels.a": {"motley.cluster.b"}, "motley.cluster.b": set()})


def test_the_picture_leaves_out_what_follows() -> None:
    names = [f"motley.kernels.{letter}" for letter in "abc"]
    a, b, c = names
    assert module_graph.reduced({a: {b, c}, b: {c}, c: set()}) == {a: {b}, b: {c}, c: set()}
    assert module_graph.rows({a: {b, c}, b: {c}, c: set()}) == [[a], [b], [c]]


def test_importing_motley_imports_nothing_heavy() -> None:
    code = "import sys, motley; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "ray", "transformers", "tokenizers", "grpc", "numpy", "typer"} & set(loaded.split())


def test_public_names_exist() -> None:
    assert all(getattr(motley, name).__name__ == name for name in motley.__all__)
    assert motley.__version__
    assert set(motley.__all__) <= set(dir(motley))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = motley.nonsense


def test_the_kernels_package_is_a_docstring() -> None:
    """Run from here, transformers imports this folder under the name of Hugging Face's `kernels`."""
    (statement,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)


def test_test_files_have_names_of_their_own() -> None:
    files = [path for path in ROOT.glob("tests/**/*.py") if path.name != "conftest.py"]
    assert len({path.name for path in files}) == len(files)
    assert "__init__.py" not in {path.name for path in files}


def test_tests_that_the_list_of_faults_names_exist() -> None:
    """A fault whose test is gone may come back."""
    named = set(re.findall(r"\b(test_\w+\.py)", (ROOT / "docs" / "contribute" / "regressions.md").read_text()))
    assert len(named) > 30
    assert named <= {path.name for path in ROOT.glob("tests/**/*.py")}


def test_nobody_is_told_to_install_this_by_its_name() -> None:
    """An index has a stranger's package `motley`, and none of ours: remedies name what is missing, docs a checkout."""
    named = re.compile(
        r"""(pip3? install|uv add|pipx install)[^`\n]*[ '"]motley(-serve|-bench)?\b(?![./-])"""
        r"""|\bmotley(-serve|-bench)?\[[a-z]+\]"""
    )
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*"), *ROOT.glob("deploy/**/*"), *ROOT.glob("loadtests/**/*")]
    for package in ("kernels", "replicas", "cluster", "src/motley/cli", "src/motley/client", "loadtests", "tools"):
        paths += ROOT.glob(f"{package}/**/*.py")
    sources = [path for path in paths if path.is_file() and path.suffix in (".md", ".py", ".yaml", ".sh", "")]
    assert len(sources) > 500
    found = [path.name for path in sources if named.search(path.read_text(errors="ignore"))]
    assert found == []
    told = ("pip install 'motley[dev]'", "pip install motley", "the extra motley[bench]", "pip install motley-serve")
    assert all(map(named.search, told))
    assert not named.search("pip install dist/motley_serve-0.1.0-py3-none-any.whl")
