"""Findings of `motley doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DoctorFact:
    """A finding. `status`: "ok", "note" (nothing to do), or "missing" with a `remedy`."""

    section: str
    name: str
    value: str
    status: Literal["ok", "note", "missing"] = "ok"
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
