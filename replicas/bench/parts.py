"""A measurement of several parts within one time: each has its share and its file, and none stops the others."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ARCHIVE", "Part", "Parts", "archived"]

ARCHIVE = "everything.tar.gz"

SAVE_S = 5.0
_FINISH = 0.96  # of the time: what is begun by then may end
_TRACE_CHARS = 4000


class Part:
    """fields: what is written into its file, now and then. left: seconds until its time is over."""

    def __init__(self, path: Path, until: float, common: Mapping[str, Any]) -> None:
        self.fields: dict[str, Any] = {**common, "complete": False, "seconds": 0.0}
        self._path = path
        self._began = self._saved = time.monotonic()
        self._until = until
        self.save()

    def left(self, share: float = 1.0) -> float:
        """Seconds up to a share of what the part had when it began."""
        return self._began + share * (self._until - self._began) - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left() <= 0

    def save(self, *, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > SAVE_S:
            self._saved = time.monotonic()
            self.fields["seconds"] = round(self._saved - self._began, 1)
            self._path.write_text(json.dumps(self.fields, indent=1) + "\n")


class Parts:
    """Runs parts one after the other.

    weights  part -> its weight in the time, of those that will run, in order; one that ends early leaves its rest to
             those after it
    common   in each part's file
    told     part -> how it went: what summary.json has
    """

    def __init__(self, out: Path, seconds: float, weights: Mapping[str, float], common: Mapping[str, Any]) -> None:
        self._out, self._common = out, common
        self._began = time.monotonic()
        self._seconds = seconds
        self.told: dict[str, dict[str, Any]] = {}
        self._until: dict[str, float] = {}
        reached = 0.0
        for name, weight in weights.items():
            reached += weight
            self._until[name] = self._began + _FINISH * seconds * reached / sum(weights.values())

    def run(self, name: str, work: Callable[[Part], bool]) -> bool:
        """Whether all was right; what it raises is kept in its file. A part not among the weights is not run."""
        if name not in self._until:
            return True
        part = Part(self._out / f"{name}.json", self._until[name], self._common)
        print(f"{name}, {part.left():.0f} s", file=sys.stderr, flush=True)
        try:
            right = work(part)
        except Exception as error:  # noqa: BLE001  whatever it is, the other parts are worth having
            right = False
            part.fields |= {"error": f"{type(error).__name__}: {error}"[:500]}
            part.fields |= {"traceback": traceback.format_exc()[-_TRACE_CHARS:]}
            traceback.print_exc()
        part.save()
        kept = ("seconds", "complete", "unreached", "error")
        self.told[name] = {"right": right, **{key: part.fields[key] for key in kept if key in part.fields}}
        self._summary()
        return right

    def _summary(self) -> None:
        whole = {
            "seconds": round(time.monotonic() - self._began, 1), "limit": self._seconds, **self._common,
            "parts": self.told, "not_reached": [name for name in self._until if name not in self.told],
        }  # fmt: skip
        (self._out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n")
        archived(self._out)

    def lines(self) -> list[str]:
        """For people: a line for each part."""
        lines = []
        for name, told in self.told.items():
            how = "right" if told["right"] else "FAILED"
            cut = f", {told['unreached']} left out" if told.get("unreached") else ""
            error = f": {told['error']}" if "error" in told else ""
            lines.append(f"{name}: {how}, {told['seconds']:.0f} s{cut}{error}")
        return lines


def archived(out: Path) -> Path:
    """All that is in the folder, as one file in it. Never half of it: it takes the place of the one before."""
    path, new = out / ARCHIVE, out / f"{ARCHIVE}.new"
    with tarfile.open(new, "w:gz") as archive:
        for each in sorted(out.iterdir()):
            if each not in (path, new):
                archive.add(each, each.name)
    os.replace(new, path)
    return path
