"""The table of what was compiled, in a page, and whether it is of the kernels as they are."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.tuning import matrix_page
from motley.kernels.tuning.compile_matrix import MatrixRow
from motley.kernels.tuning.source_text import code_alone

ROWS = [
    MatrixRow("op", "kernel", (6, 1), "m=1", {}, "", "", registers=40, shared=2048, occupancy=0.5, mix={"fma.f32": 3})
]
DIGEST = functools.cache(matrix_page.sources_digest)  # it reads all kernels
MARKS = "before\n<!-- matrix: begin -->\nold\n<!-- matrix: end -->\nafter\n"


def test_a_table_has_a_column_for_each_capability() -> None:
    head, rule = matrix_page.render_matrix([]).splitlines()
    assert head.count("|") == rule.count("|") == len(CAPABILITIES) + 2


@pytest.mark.parametrize("before", [None, "", MARKS, MARKS.removesuffix("after\n")])
def test_a_page_has_the_table_that_was_written_and_what_is_around_it(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again, whatever it had: twice the same is once."""
    monkeypatch.setattr(matrix_page, "sources_digest", DIGEST)
    path = tmp_path / "page.md"
    if before is not None:
        path.write_text(before)
    assert not matrix_page.is_page_current(path)
    for rows in (ROWS, [], ROWS, ROWS):
        matrix_page.write_page(path, rows, complete=True)
        assert matrix_page.read_matrix(path) == matrix_page.render_matrix(rows)
        assert matrix_page.is_page_current(path)
    if before:
        text = path.read_text()
        assert text.startswith("before\n<!-- matrix: begin -->\n")
        assert text.endswith(before.partition("old\n")[2])
        assert text.count("| op |") == 1
    matrix_page.write_page(path, ROWS, complete=False)
    assert matrix_page.read_matrix(path) == matrix_page.render_matrix(ROWS)
    assert not matrix_page.is_page_current(path), "of a part of the kernels nothing is said of all"


def test_code_alone_is_what_is_digested() -> None:
    source = '''"""Module."""
import x  # why


class A:
    """Class.

    More.
    """

    text = """
    # stays
    """

    def f(self): "one line"; return "#" # why
'''
    code = 'import x\nclass A:\n    text = """\n    # stays\n    """\n    def f(self): "one line"; return "#"'
    assert code_alone(source) == code
    assert code_alone(code) == code


def test_a_table_is_of_the_very_sources_tables_and_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of these changes; the CPU's part, and what only measures, has nothing to do with it."""
    folder, path = tmp_path / "kernels", tmp_path / "page.md"
    shutil.copytree(matrix_page._HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(matrix_page, "_HERE", folder)
    monkeypatch.setattr(matrix_page, "code_alone", functools.cache(code_alone))  # of each text once
    matrix_page.write_page(path, ROWS, complete=True)
    for changed in ("cpu/c_kernels/shm_collectives.py", "README.md", "tuning/timing.py", "tuning/streaming_kernels.py"):
        with (folder / changed).open("a") as file:
            file.write("# changed\n")
        assert matrix_page.is_page_current(path), changed
    for changed in ("w4a16/int4_gemv.py", "compiler/aot.py", "tuned/sm61/w4a16_gemv.json"):
        before = (folder / changed).read_bytes()
        (folder / changed).write_bytes(before + (b"CHANGED = 1\n" if changed.endswith(".py") else b"\n"))
        assert not matrix_page.is_page_current(path), changed
        (folder / changed).write_bytes(before)
        assert matrix_page.is_page_current(path)
    gemv = folder / "w4a16" / "int4_gemv.py"
    gemv.write_text(gemv.read_text().replace('"""', '"""Otherwise said: ', 1) + "# and a comment\n")
    assert matrix_page.is_page_current(path), "what is said of the code decides nothing"
    (folder / "silu.py").write_text("")
    assert not matrix_page.is_page_current(path)
    (folder / "silu.py").unlink()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.4.0")
    assert not matrix_page.is_page_current(path)
