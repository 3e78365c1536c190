"""JSON schema of fleet files, for editors: `make schema` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fleet_spec import FleetSpec

FILE = Path(__file__).resolve().parents[3] / "deploy" / "fleet.schema.json"


def fleet_schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **FleetSpec.model_json_schema(mode="validation"),
        "title": "A fleet of Motley",
    }


def schema_text() -> str:
    return json.dumps(fleet_schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text())
