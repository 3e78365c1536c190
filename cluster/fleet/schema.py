"""JSON schema of fleet files, for editors: `make schema` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .spec import FleetSpec

__all__ = ["schema", "text"]

FILE = Path(__file__).resolve().parents[2] / "deploy" / "fleet.schema.json"


def schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **FleetSpec.model_json_schema(mode="validation"),
        "title": "A fleet of Motley",
    }


def text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
