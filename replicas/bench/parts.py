"""A measurement of several parts within one time: each has its share and its file, and none stops the others."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ARCHIVE", "Part", "Parts", "Stage", "archived"]

ARCHIVE = "everything.tar.gz"

SAVE_S = 5.0
_FINISH = 0.96  # of the time: what is begun by then may end
_TRACE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Stage:
    """A turn of a part. weight: in the time. first: only what comes first in that part."""

    part: str
    weight: float
    first: bool = False


class Part:
    """fields: what is written into its file, now and then. left: seconds until the time of its turn is over."""

    def __init__(self, path: Path, until: float, common: Mapping[str, Any]) -> None:
        self.fields: dict[str, Any] = {**common, "complete": False, "seconds": 0.0}
        self._path = path
        self._spent = 0.0
        self._began = self._saved = time.monotonic()
        self._until = until
        self.save()

    def turn(self, until: float) -> None:
        """Another one, after a pause that is not counted."""
        self._spent = self.fields["seconds"]
        self._began, self._until = time.monotonic(), until

    def left(self, share: float = 1.0) -> float:
        """Seconds up to a share of what this turn had when it began."""
        return self._began + share * (self._until - self._began) - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left() <= 0

    def save(self, *, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > SAVE_S:
            self._saved = time.monotonic()
            self.fields["seconds"] = round(self._spent + self._saved - self._began, 1)
            self._path.write_text(json.dumps(self.fields, indent=1) + "\n")


Work = Callable[[Part, bool], bool]  # the part, whether only what comes first -> whether all was right


class Parts:
    """Runs stages one after the other. One that ends early leaves its rest to the next, and what one takes beyond its
    time is taken from all that follow, each by its weight: no turn ends later than the whole may.

    When all had their turn, what time is left is for parts that were cut ("unreached" among their fields): each in
    turn, all of it. What a part left out for want of memory ("skipped") is told, and is no fault.

    common   in each part's file
    told     part -> how it went: what summary.json has
    """

    def __init__(self, out: Path, seconds: float, stages: Sequence[Stage], common: Mapping[str, Any]) -> None:
        self._out, self._common = out, common
        self._began = time.monotonic()
        self._seconds = seconds
        self._stages = stages
        self._parts: dict[str, Part] = {}
        self.told: dict[str, dict[str, Any]] = {}

    def run(self, works: Mapping[str, Work]) -> bool:
        """Whether all was right; what one raises is kept in its file, and it has no further turn."""
        reached, total, end = 0.0, sum(stage.weight for stage in self._stages), self._began + _FINISH * self._seconds
        for stage in self._stages:
            now, rest = time.monotonic(), total - reached
            reached += stage.weight
            due = end - _FINISH * self._seconds * (1 - reached / total)
            share = now + (end - now) * stage.weight / rest if rest > 0 else now
            self._turn(stage.part, works[stage.part], stage.first, max(due, share))
        for name, told in list(self.told.items()):
            if told.get("unreached") and time.monotonic() < end:
                self._turn(name, works[name], False, end)
        return all(told["right"] for told in self.told.values())

    def _turn(self, name: str, work: Work, first: bool, until: float) -> None:
        if (part := self._parts.get(name)) is None:
            part = self._parts[name] = Part(self._out / f"{name}.json", until, self._common)
        elif "traceback" in part.fields or not self.told[name].get("unreached"):
            return
        else:
            part.turn(until)
        print(f"{name}, {part.left():.0f} s", file=sys.stderr, flush=True)
        try:
            right = work(part, first)
        except Exception as error:  # noqa: BLE001  whatever it is, the other parts are worth having
            right = False
            part.fields |= {"complete": False, "error": f"{type(error).__name__}: {error}"[:500]}
            part.fields |= {"traceback": traceback.format_exc()[-_TRACE_CHARS:]}
            traceback.print_exc()
        part.save()
        kept = ("seconds", "complete", "unreached", "skipped", "error")
        self.told[name] = {"right": right, **{key: part.fields[key] for key in kept if key in part.fields}}
        self._summary()

    def _summary(self) -> None:
        whole = {
            "seconds": round(time.monotonic() - self._began, 1), "limit": self._seconds, **self._common,
            "parts": self.told, "not_reached": [
                name for name in dict.fromkeys(stage.part for stage in self._stages) if name not in self.told
            ],
        }  # fmt: skip
        (self._out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n")
        archived(self._out)

    def lines(self) -> list[str]:
        """For people: a line for each part."""
        lines = []
        for name, told in self.told.items():
            how = "right" if told["right"] else "FAILED"
            cut = f", {told['unreached']} left out" if told.get("unreached") else ""
            skipped = f", {len(told['skipped'])} skipped, for want of memory" if told.get("skipped") else ""
            error = f": {told['error']}" if "error" in told else ""
            lines.append(f"{name}: {how}, {told['seconds']:.0f} s{cut}{skipped}{error}")
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
