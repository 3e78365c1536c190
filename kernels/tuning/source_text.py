"""Code of Python sources without docstrings, comments, blank lines and trailing spaces, which affect no kernel."""

from __future__ import annotations

import ast
import io
import tokenize


def code_alone(source: str) -> str:
    """Return the code of a source, line by line, the same with every version of Python. Raises SyntaxError."""
    lines = source.splitlines()
    for number, column in _comments(source):
        lines[number - 1] = lines[number - 1][:column]
    for first, last in _docstrings(source):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(text for line in lines if (text := line.rstrip()))


def _comments(source: str) -> list[tuple[int, int]]:
    """Return the line, counted from 1, and the column of each comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type == tokenize.COMMENT]


def _docstrings(source: str) -> list[tuple[int, int]]:
    """Return the first and last line of each docstring that shares its lines with no code."""
    found = []
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                begin, end = first.lineno, first.end_lineno or first.lineno
                if (
                    not lines[begin - 1][: first.col_offset].strip()
                    and not lines[end - 1][first.end_col_offset :].strip()
                ):
                    found.append((begin, end))
    return found
