"""Each folder's docstring says which folders it imports, and where the next of its kind goes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "replicas", "cluster")
FOR_ALL = {"host", "protos", "ray_compat"}  # which every folder of their package may import
ALL = re.compile(r"\b(?:every folder|everything below|all below it|everything below the engine|all of offload)\b")
NEXT = re.compile(
    r"\b(?:goes?|moves?|belongs) (?:here|in|to|into)\b|\b(?:[Aa] new|[Aa]nother|[Tt]he next|[Aa] further)\b"
    r"|\bis a (?:row|line|method) of\b|\bbegins in\b"
)
NONE = "No modules at this level."


def folders() -> dict[str, str]:
    """Return the docstring of each folder below the packages' roots, by its dotted path."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).glob("*/**/__init__.py")):
            folder = ".".join(path.parent.relative_to(ROOT).parts)
            found[folder] = ast.get_docstring(ast.parse(path.read_text())) or ""
    return found


def imported(graph: grimp.ImportGraph, folder: str) -> Iterator[str]:
    """Yield the folders of the same package, beside others, that a folder's own modules import; for types too."""
    for module in graph.find_children(f"motley.{folder}"):
        for other in graph.find_modules_directly_imported_by(module):
            there = _folder_of(graph, other)
            within = there == folder or there.startswith(f"{folder}.") or folder.startswith(f"{there}.")
            if there.split(".")[0] == folder.split(".")[0] and not within:
                yield there


def _folder_of(graph: grimp.ImportGraph, module: str) -> str:
    name = module.removeprefix("motley.")
    return name if graph.find_children(module) else name.rpartition(".")[0]


def unsaid(docstring: str, others: Iterator[str]) -> set[str]:
    """Return those folders that a docstring names neither themselves nor by one around them."""
    if ALL.search(docstring):
        return set()
    words = set(re.findall(r"\w+", docstring))
    return {other for other in others if not {*other.split(".")[1:]} & {*words, *FOR_ALL}}


def test_each_folder_names_those_that_it_imports() -> None:
    graph = grimp.build_graph("motley", cache_dir=None)
    missing = {folder: unsaid(said, imported(graph, folder)) for folder, said in folders().items()}
    assert {folder: names for folder, names in missing.items() if names} == {}


def test_each_folder_says_where_the_next_of_its_kind_goes() -> None:
    assert [
        folder for folder, said in folders().items() if NONE not in said and not NEXT.search(" ".join(said.split()))
    ] == []


@pytest.mark.parametrize(
    ("said", "others", "left"),
    [
        ("Imports `kv.store`.", ["replicas.kv.store"], set()),
        ("May import kv.", ["replicas.kv.store", "replicas.host"], set()),
        ("May import kv.", ["replicas.gpu"], {"replicas.gpu"}),
        ("May import every folder.", ["replicas.gpu"], set()),
    ],
)
def test_what_is_not_said_is_found(said: str, others: list[str], left: set[str]) -> None:
    assert unsaid(said, iter(others)) == left
