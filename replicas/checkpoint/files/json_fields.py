"""JSON files of a checkpoint: read within a size, and their fields checked for types and ranges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...short_repr import first_duplicate, short_repr
from .checkpoint_folder import read_checkpoint_file

MAX_JSON_BYTES = 1 << 20
MAX_CONFIG_BYTES = 32 << 20  # config.json may be larger, since some writers put their calibration texts into it


def read_json(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a checkpoint's file. Raises CheckpointError naming the file."""
    return parse_json(read_checkpoint_file(folder, name, limit), name)


def parse_json(data: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Raises CheckpointError naming `file`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = first_duplicate(key for key, _ in pairs) or ""
            raise CheckpointError("is there twice", file=file, tensor=twice)
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not UTF-8 at byte {error.start}", file=file) from error
    except RecursionError as error:
        raise CheckpointError("nested too deeply", file=file) from error
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise CheckpointError(f"not valid JSON: {error}", file=file) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a {type(value).__name__}; expected an object", file=file)
    return value


class JsonFields:
    """Fields of one JSON object, read with type and range.

    Every method raises CheckpointError naming the file, the key, the value and what would be accepted. A key
    that is absent or null takes the default; without a default it is an error.
    """

    def __init__(self, raw: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self.raw = raw
        self.file = file
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def error(self, key: str, accepted: str) -> CheckpointError:
        return self.error_at(key, self.raw.get(key), accepted)

    def error_at(self, path: str, value: Any, accepted: str) -> CheckpointError:
        """Return the error for a refused value at a dotted path within the object."""
        problem = "is missing" if value is None else f"{short_repr(value)} is not accepted"
        return CheckpointError(f"{problem}; expected {accepted}", file=self.file, tensor=self.prefix + path)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"a number from {low:g} to {high:g}")
        if not low <= value <= high:  # false for NaN too
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, accepted: tuple[str, ...], default: str | None = None) -> str:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in accepted:
            raise self.error(key, " or ".join(accepted))
        return value

    def section(self, key: str) -> JsonFields | None:
        """Return a nested object, or None where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(value, self.file, f"{self.prefix}{key}.")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return an integer or a list of integers as a tuple; an absent key gives an empty one."""
        value = self.raw.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values):
            raise self.error(key, f"an integer from {low} to {high}, or a list of them")
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings as a tuple; an absent key gives an empty one."""
        value = self.raw.get(key)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise self.error(key, "a list of strings")
        return tuple(values)

    def says(self, key: str) -> bool:
        """Return whether the key's value says something: null, false and empty values say nothing."""
        return self.raw.get(key) not in (None, False, "", [], {})

    def refuse_unknown(self, expected: frozenset[str]) -> None:
        """Raise CheckpointError for a key that is not in `expected` and says something."""
        for key in self.raw:
            if key not in expected and self.says(key):
                raise self.error(key, "this key to be absent, since it is not understood here")
