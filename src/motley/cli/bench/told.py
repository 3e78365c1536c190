"""How a benchmark ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tell(report: dict[str, Any], text: Callable[[dict[str, Any]], str], out: Path | None, *, as_json: bool) -> None:
    """The report into the file `out`, and to stdout as one JSON object or as text. Raises OSError of the file."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else text(report))
