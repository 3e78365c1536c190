"""Benchmark of several parts within one time limit: each has its share and its file, and a failed part stops no
other.
"""

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

ARCHIVE = "everything.tar.gz"

SAVE_S = 5.0
_FINISH = 0.96  # share of the time by which parts should end; what has begun by then may finish
_TRACE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One turn of a part.

    weight  share of the time, relative to the other stages' weights
    first   True: the turn does only the most important work of the part
    """

    part: str
    weight: float
    first: bool = False


class BenchPart:
    """Part of a benchmark that is running, and its file of results.

    until   monotonic time at which its turn is over
    fields  results, which are written to the file from time to time
    """

    def __init__(self, path: Path, until: float, common: Mapping[str, Any]) -> None:
        self.fields: dict[str, Any] = {**common, "complete": False, "seconds": 0.0}
        self._path = path
        self._spent = 0.0
        self._began = self._saved = time.monotonic()
        self._until = until
        self.save()

    def turn(self, until: float) -> None:
        """Begin another turn, until the monotonic time `until`; the pause before it is not counted."""
        self._spent = self.fields["seconds"]
        self._began, self._until = time.monotonic(), until

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the turn's time is over."""
        return self._began + share * (self._until - self._began) - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left() <= 0

    def save(self, *, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > SAVE_S:
            self._saved = time.monotonic()
            self.fields["seconds"] = round(self._spent + self._saved - self._began, 1)
            self._path.write_text(json.dumps(self.fields, indent=1) + "\n")


Work = Callable[[BenchPart, bool], bool]  # (part, whether only its most important work) -> whether all was right


class BenchSchedule:
    """Runner of stages, one after the other, within one time limit.

    A stage that ends early leaves its time to the next. Time that a stage takes beyond its share is taken from all
    later ones by weight, so that no turn ends later than the limit allows.

    When all stages had their turn, the time that is left goes to parts that were cut off ("unreached" in their fields),
    to each in turn all of it. What a part skipped for lack of memory ("skipped") is reported, and is no failure.

    common    fields that each part's file begins with
    outcomes  results of each part by name, as summary.json has them
    """

    def __init__(self, out: Path, seconds: float, stages: Sequence[BenchTurn], common: Mapping[str, Any]) -> None:
        self._out, self._common = out, common
        self._began = time.monotonic()
        self._seconds = seconds
        self._stages = stages
        self._parts: dict[str, BenchPart] = {}
        self.outcomes: dict[str, dict[str, Any]] = {}

    def run(self, works: Mapping[str, Work]) -> bool:
        """Run all stages; return whether all was right.

        An exception of a part is recorded in its file, and the part has no further turn.
        """
        reached, total, end = 0.0, sum(stage.weight for stage in self._stages), self._began + _FINISH * self._seconds
        for stage in self._stages:
            now, rest = time.monotonic(), total - reached
            reached += stage.weight
            due = end - _FINISH * self._seconds * (1 - reached / total)
            share = now + (end - now) * stage.weight / rest if rest > 0 else now
            self._turn(stage.part, works[stage.part], stage.first, max(due, share))
        for name, outcome in list(self.outcomes.items()):
            if outcome.get("unreached") and time.monotonic() < end:
                self._turn(name, works[name], False, end)
        return all(outcome["right"] for outcome in self.outcomes.values())

    def _turn(self, name: str, work: Work, first: bool, until: float) -> None:
        if (part := self._parts.get(name)) is None:
            part = self._parts[name] = BenchPart(self._out / f"{name}.json", until, self._common)
        elif "traceback" in part.fields or not self.outcomes[name].get("unreached"):
            return
        else:
            part.turn(until)
        print(f"{name}, {part.left():.0f} s", file=sys.stderr, flush=True)
        try:
            right = work(part, first)
        except Exception as error:  # noqa: BLE001  whatever is raised, the other parts should run
            right = False
            part.fields |= {"complete": False, "error": f"{type(error).__name__}: {error}"[:500]}
            part.fields |= {"traceback": traceback.format_exc()[-_TRACE_CHARS:]}
            traceback.print_exc()
        part.save()
        reported_keys = ("seconds", "complete", "unreached", "skipped", "error")
        self.outcomes[name] = {"right": right, **{key: part.fields[key] for key in reported_keys if key in part.fields}}
        self._summary()

    def _summary(self) -> None:
        whole = {
            "seconds": round(time.monotonic() - self._began, 1), "limit": self._seconds, **self._common,
            "parts": self.outcomes, "not_reached": [
                name for name in dict.fromkeys(stage.part for stage in self._stages) if name not in self.outcomes
            ],
        }  # fmt: skip
        (self._out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n")
        archived(self._out)

    def lines(self) -> list[str]:
        """Return a line of text about each part, for people to read."""
        lines = []
        for name, outcome in self.outcomes.items():
            how = "right" if outcome["right"] else "FAILED"
            cut = f", {outcome['unreached']} left out" if outcome.get("unreached") else ""
            skipped = f", {len(outcome['skipped'])} skipped, for want of memory" if outcome.get("skipped") else ""
            error = f": {outcome['error']}" if "error" in outcome else ""
            lines.append(f"{name}: {how}, {outcome['seconds']:.0f} s{cut}{skipped}{error}")
        return lines


def archived(out: Path) -> Path:
    """Archive the folder's files as one file in the folder, and return its path.

    The new archive replaces an older one at once, so that it is never incomplete.
    """
    path, new = out / ARCHIVE, out / f"{ARCHIVE}.new"
    with tarfile.open(new, "w:gz") as archive:
        for each in sorted(out.iterdir()):
            if each not in (path, new):
                archive.add(each, each.name)
    os.replace(new, path)
    return path
