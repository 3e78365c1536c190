"""README and the pages of docs/: links lead somewhere, commands exist, and what follows from the code is up to date."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import reference_pages
import site_pages
import typer
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from motley.cli.app import app
from motley.cluster.fleet.spec.fleet_spec import FleetSpec

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
OTHERS = [ROOT / "kernels" / "README.md", ROOT / "tests" / "planted" / "README.md"]  # which pages link to
GENERATED = {DOCS / "api.md", *reference_pages.pages()}
BY_HAND = [page for page in PAGES if page not in GENERATED]
OLD_NAMES = {DOCS / "contribute" / "moved.md", DOCS / "contribute" / "renames.md"}

MAX_LINES, MAX_WORDS, MAX_ITEM_WORDS = 150, 1500, 80
NOT_INSTALLED = {"tritonclient"}  # modules that a page may import and the suite does without
OF_OTHERS = {"--labels", "--model", "--model_args", "--tasks"}  # options of ray and of lm_eval
OF_OTHERS |= {"--headless", "--processes", "--master", "--worker"}  # and of Locust
LOCUST = ROOT / "loadtests" / "motley_bench" / "locust_load" / "locust_options.py"  # which adds some to Locust's
THEME_ONLY = re.compile(r'^\s*(!!! |\?\?\?\+? |=== "|\{: |:::)|:(material|octicons|fontawesome)-', re.MULTILINE)
FILE = re.compile(r"^(kernels|replicas|cluster|src|tests|tools|deploy|loadtests|docs|system)/[\w./-]*\w$")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def inline(page: Path) -> Iterator[Token]:
    return (child for token in tokens(page) for child in token.children or ())


def fences(page: Path, *languages: str) -> list[str]:
    return [token.content for token in tokens(page) if token.type == "fence" and token.info.strip() in languages]


def codes(page: Path) -> list[str]:
    return [token.content for token in inline(page) if token.type == "code_inline"]


# Links.


def slug_of_repository(heading: str) -> str:
    """The anchor of a heading where the repository is shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def slug_of_site(heading: str) -> str:
    """The anchor of a heading on the site."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@cache
def headings(page: Path) -> list[str]:
    found = zip(tokens(page), tokens(page)[1:], strict=False)
    texts = [inside for opening, inside in found if opening.type == "heading_open"]
    return ["".join(child.content for child in text.children or ()) for text in texts]


def dead_links(page: Path) -> Iterator[str]:
    for token in inline(page):
        target = token.attrGet("href") or token.attrGet("src")
        if not isinstance(target, str) or re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_file():
            yield f"{target}: there is no such file"
        elif anchor:
            there = headings(file)
            if [slug_of_repository(one) for one in there].count(anchor) != 1:
                yield f"{target}: not the anchor of one heading where the repository is shown"
            if [slug_of_site(one) for one in there].count(anchor) != 1:
                yield f"{target}: not the anchor of one heading on the site"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n[1](none.md) [2](#a-page) [3](#b) ![4](x.svg)\n\n| [5](page.md#c) |\n|-|\n| [6](page.md) |"
    )
    assert {dead.split(":")[0] for dead in dead_links(page)} == {"none.md", "#b", "x.svg", "page.md#c"}


def navigation(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for inside in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from navigation(inside)


def test_each_page_is_in_the_navigation_once() -> None:
    listed = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page != README)


def test_links_of_the_site_stay_within_it(tmp_path: Path) -> None:
    site = site_pages.copy(tmp_path / "site")
    copied = sorted(site.rglob("*.md"))
    assert len(copied) >= len(PAGES)
    for page in copied:
        assert list(dead_links(page)) == [], page.relative_to(site)
        targets = [token.attrGet("href") or token.attrGet("src") for token in inline(page)]
        local = [str(one).partition("#")[0] for one in targets if one and not re.match(r"https?:|mailto:", str(one))]
        assert all((page.parent / one).resolve().is_relative_to(site) for one in local), page.relative_to(site)


def test_what_a_site_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    page = '<a href="https://a.b/"><img src="here.svg"><script src="https://c.d/e.js"></script>'
    (tmp_path / "page.html").write_text(page + '<link rel="stylesheet" href="//f.g/h.css"><link href="i.css">')
    assert list(site_pages.loaded_from_elsewhere(tmp_path)) == ["page.html: https://c.d/e.js", "page.html: //f.g/h.css"]


# How pages are written.


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split()) <= MAX_WORDS


@pytest.mark.parametrize("page", BY_HAND, ids=named)
def test_items_are_short(page: Path) -> None:
    long, depth = [], 0
    for token in tokens(page):
        depth += (token.type == "list_item_open") - (token.type == "list_item_close")
        if depth and token.type == "inline" and len(token.content.split()) > MAX_ITEM_WORDS:
            long.append(f"{len(token.content.split())} words: {token.content[:60]}")
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_are_plain_markdown(page: Path) -> None:
    """The builder of the site can be changed for another."""
    assert THEME_ONLY.findall(FENCED.sub("", page.read_text(encoding="utf-8"))) == []


FENCED = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


# What pages name.


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def lines(page: Path) -> Iterator[str]:
    """Command lines of a page, without what is around them."""
    for block in fences(page, "sh"):
        yield from block.replace("\\\n", " ").splitlines()
    yield from codes(page)


def calls(line: str, program: str) -> Iterator[list[str]]:
    """Arguments of each call of a program in a command line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an open quote: no command line
        return
    starts = [i + 1 for i, word in enumerate(words) if word in ("|", "&&", "||", ";")]
    for start in (0, *starts):
        part = words[start:]
        ends = [i for i, word in enumerate(part) if word in ("|", "&&", "||", ";", ">")]
        part = part[: ends[0]] if ends else part
        while part and re.fullmatch(r"[A-Z_]+=.*", part[0]):
            part = part[1:]
        if part and part[0].rpartition("/")[2] == program:
            yield part[1:]


def refusal(command: Any, option: Any, value: str) -> str:
    """Return how an option refuses a value; nothing where it stands for one, as N, DIR and $HOST do, or is a path."""
    if re.search(r"[A-Z…$<{/]|\.[a-z]+$", value) or option.bare_type is Path:
        return ""
    try:
        option.process_value(command.context_class(command), [value] if option.multiple else value)
    except (ValueError, RuntimeError, typer.BadParameter) as error:
        return f"{option.opts[0]} {value}: {error}"
    return ""


def problem(arguments: list[str], in_text: bool = False) -> str:
    """Return what is wrong with a call of `motley`; empty: nothing. In a text it may end with the name of an option."""
    command, path = root_command(), "motley"
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        if arguments[0] not in command.commands and arguments[0] not in ("…", "COMMAND"):
            return f"{path} has no command {arguments[0]}"
        if arguments[0] in ("…", "COMMAND"):
            return ""
        command, path, arguments = command.commands[arguments[0]], f"{path} {arguments[0]}", arguments[1:]
    if hasattr(command, "commands"):
        return ""  # a group alone, as text names it
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts) if name[0] == "-"}
    places = [one.nargs for one in command.params if one.param_type_name == "argument"]
    given, words = 0, iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--":
            return ""  # what follows is another command's
        if not word.startswith("-") or word in ("-", "-h"):
            given += word != "…"
        elif name not in options and name != "--help":
            return f"{path} has no option {name}"
        elif name in options and not options[name].is_flag:
            value = word.partition("=")[2] if equals else next(words, None)
            if value is None:
                return "" if in_text else f"{path}: {name} wants a value"
            if said := refusal(command, options[name], value):
                return f"{path}: {said}"
    return f"{path} takes {sum(places)} arguments" if -1 not in places and given > sum(places) else ""


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=named)
def test_commands_are_ones(page: Path) -> None:
    blocks = [line for block in fences(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    found = [(line, False) for line in blocks] + [(line, True) for line in codes(page)]
    each = ((line, problem(call, in_text)) for line, in_text in found for call in calls(line, "motley"))
    assert [f"{line}: {said}" for line, said in each if said] == []


def test_wrong_commands_are_found() -> None:
    good = ("serve", "serve x.yaml --http-port 8080", "bench fleet", "fleet scale cpu 3 --wait", "bench", "…")
    assert [problem(shlex.split(line)) for line in good] == [""] * len(good)
    for line in (
        "server",
        "serve --htp-port 1",
        "fleet scales",
        "serve a b",
        "fleet scale cpu 3 4",
        "serve --host",
        "serve --http-port x",
    ):
        assert problem(shlex.split(line)), line
    assert list(calls("FOO=1 motley a -b | motley c > d # motley e", "motley")) == [["a", "-b"], ["c"]]


def options_of(command: Any) -> set[str]:
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", BY_HAND, ids=named)
def test_options_in_the_text_exist(page: Path) -> None:
    """An option of a command that is named with it is looked for there, by test_commands_are_ones."""
    known = options_of(root_command()) | OF_OTHERS | set(re.findall(r'add_argument\("(--[\w-]+)"', LOCUST.read_text()))
    texts = [code for code in codes(page) if code.startswith("--")]
    assert [code for code in texts if re.split(r"[ =\[]", code)[0] not in known] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=named)
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [call for line in lines(page) for call in calls(line, "make")]
    assert [word for call in called for word in call if "=" not in word and word not in targets] == []


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")], ids=named)
def test_python_names_what_exists(page: Path) -> None:
    for block in fences(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.split(".")[0] in NOT_INSTALLED or importlib.import_module(alias.name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in NOT_INSTALLED:
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


@pytest.mark.parametrize("page", [page for page in [*BY_HAND, *OTHERS] if page not in OLD_NAMES], ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """Tests may be named by their place below tests/, and files of a package on the page that lies in it."""
    paths = [code.partition("::")[0].rstrip("/") for code in codes(page)]
    paths = [path for path in paths if FILE.match(path) or (page in OTHERS and path.endswith(".py"))]
    places = (ROOT, ROOT / "tests", page.parent)
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


@pytest.mark.parametrize("page", [page for page in BY_HAND if page not in OLD_NAMES], ids=named)
def test_modules_that_are_named_exist(page: Path) -> None:
    """`motley.v1` and what is in it are names of the wire."""
    found = {name for code in codes(page) for name in re.findall(r"\bmotley(?:\.[a-z_]\w*)+", code)}
    assert [name for name in sorted(found) if not name.startswith("motley.v1") and find_spec(name) is None] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("contribute/add-*.md")), ids=named)
def test_classes_and_tables_that_are_named_are_in_the_files_that_are(page: Path) -> None:
    places = [ROOT / code for code in codes(page) if FILE.match(code)]
    files = {file for place in places for file in ([place] if place.is_file() else place.glob("*.py"))}
    words = re.compile(r"\b(?:[A-Z][a-z]+(?:[A-Z][a-z]+)+|[A-Z]{4,})\b")
    names = {name for code in codes(page) for name in words.findall(code)} - {"README"}
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "yaml")], ids=named)
def test_pieces_of_fleet_files_are_valid(page: Path) -> None:
    for block in fences(page, "yaml"):
        given = {"model": "demo", "pools": [{"name": "any"}], **yaml.safe_load(block)}
        assert FleetSpec.model_validate(given).pools


# What follows from the code.


def test_each_command_and_option_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for group in ("", *(f"{name} " for name, one in root_command().commands.items() if hasattr(one, "commands"))):
        command = root_command().commands[group.strip()] if group else root_command()
        for name in command.commands:
            assert re.search(rf"^#+ motley {group}{name}$", text, re.MULTILINE)
    everywhere = {"--help", "--version", "--install-completion", "--show-completion"}
    names = {name for name in options_of(root_command()) - everywhere if name.startswith("--")}
    assert len(names) > 100
    assert [name for name in sorted(names) if not re.search(f"`{name}[` ]", text)] == []
