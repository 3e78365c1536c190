"""Copies docs/ to build/site-pages for the builder of the site, with the other files that it links to.

On the repository's own pages a link may lead anywhere in it. A site has its own folder alone: a file outside of docs/
is copied to `files/`, and the link leads there. Everything else stays as it is, so that any builder can take the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUT = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "site"
ELSEWHERE = "files"
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
LOADED = re.compile(r'<link\b[^>]*\bhref="((?:https?:)?//[^"]+)"|\bsrc="((?:https?:)?//[^"]+)"')
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def copy(out: Path = OUT) -> Path:
    """Write the copy anew and return its folder. Raises FileNotFoundError for a link that leads nowhere."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(DOCS, out)
    pages = {path: out / path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    while pages:
        source, target = pages.popitem()
        text, linked = moved(source, target, out)
        target.write_text(text, encoding="utf-8")
        for file in linked:
            place = _place(file, out)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
                if file.suffix == ".md":
                    pages[file] = place
    return out


def moved(source: Path, target: Path, out: Path) -> tuple[str, list[Path]]:
    """Return a page with its links as the copy has them, and the files outside of docs/ that they lead to."""
    linked: list[Path] = []

    def lead(match: re.Match[str]) -> str:
        file = (source.parent / match[2]).resolve(strict=True)
        if not file.is_relative_to(DOCS):
            linked.append(file)
        return f"{match[1]}{os.path.relpath(_place(file, out), target.parent)}{match[3] or ''}{match[4]}"

    text = source.read_text(encoding="utf-8")
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(lead, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lead, text[end:])]), linked


def _place(file: Path, out: Path) -> Path:
    """Where the copy has a file of the repository. The README is the site's first page."""
    if file == ROOT / "README.md":
        return out / "index.md"
    return out / file.relative_to(DOCS) if file.is_relative_to(DOCS) else out / ELSEWHERE / file.relative_to(ROOT)


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """Yield what a browser would ask other servers for when it shows a page."""
    for page in sorted(site.rglob("*.html")):
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)}: {match[1] or match[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if found := list(loaded_from_elsewhere(SITE)):
            sys.exit("\n".join(["pages load from elsewhere:", *found]))
    else:
        print(f"copied: {copy().relative_to(ROOT)}")
