"""Program behind `make reference`, which writes the generated files; a test fails when a file differs from its
output.
"""

from __future__ import annotations

from pathlib import Path

from . import http_codes
from .reference_page import PAGE, write_reference

codes = http_codes.write()  # first: the page tells of them
PAGE.write_text(write_reference(), encoding="utf-8")
for path in (codes, PAGE):
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
