"""`make reference` runs this; a test fails when the file is not what it would write."""

from __future__ import annotations

from pathlib import Path

from .page import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
