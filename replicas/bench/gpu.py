"""`motley bench gpu`: everything there is to do on a GPU, in one command, into one folder.

It runs where torch, Triton and numpy are and nothing else of ours need be installed:

    python -m motley.replicas.bench.gpu --out DIR

Each step writes its file when it ends, so that what was done is kept if time runs out. Without a GPU, --rehearse
goes through the same steps on small shapes in Triton's interpreter (in fp16, since it computes bf16 wrongly): what
it writes says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ...kernels.operation import Operation
    from ...kernels.precision import PrecisionPolicy

__all__ = ["main", "run"]

SECONDS = 480.0
TUNING_SHARE = 0.5  # of the time that the checks leave


@dataclass(frozen=True, slots=True)
class Place:
    """Where it runs. policy is the device's own, or in a rehearsal that of `--cc`."""

    device: torch.device
    policy: PrecisionPolicy
    rehearsal: bool
    until: float

    def left(self) -> float:
        return self.until - time.monotonic()


def run(out: Path, seconds: float = SECONDS, rehearse: tuple[int, int] | None = None, ops: Sequence[str] = ()) -> bool:
    """Whether every check passed. `rehearse`: the capability whose kernels are rehearsed. `ops`: all if empty.

    Raises RuntimeError without a GPU, unless it is a rehearsal.
    """
    began = time.monotonic()
    if rehearse is not None:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    from ...kernels.precision import policy_of
    from ...kernels.registry import OPERATIONS, operation

    if rehearse is None and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here; --rehearse goes through the steps without one")
    device = torch.device("cpu" if rehearse else "cuda:0")
    capability = rehearse or torch.cuda.get_device_capability(device)
    policy = policy_of(*capability)
    if rehearse is not None and policy.storage == "bf16":  # which the interpreter computes wrongly
        policy = replace(policy, storage="fp16", compute="fp16")
    place = Place(device, policy, rehearse is not None, began + seconds)
    operations = [operation(name) for name in ops] or list(OPERATIONS)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "machine.json", _machine(place))
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("checks", lambda: _checks(place, operations)),
        ("tuning", lambda: _tuning(place, operations, out / "tuned")),
        ("kernels", lambda: _kernels(place, operations)),
    ]
    passed = True
    for name, step in steps:
        print(f"{name}, {place.left():.0f} s left", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            found = step()
        except Exception as error:  # noqa: BLE001  the next step may still be worth its time
            traceback.print_exc()
            found, passed = {"error": f"{type(error).__name__}: {error}"}, False
        passed &= not found.get("failed")
        _write(out / f"{name}.json", {"rehearsal": place.rehearsal, "seconds": time.monotonic() - started, **found})
    return passed


def _machine(place: Place) -> dict[str, Any]:
    import torch

    from .report import machine, versions

    found = {**machine(), "rehearsal": place.rehearsal, "capability": str(place.policy.capability)}
    found["storage"] = place.policy.storage
    if not place.rehearsal:
        properties = torch.cuda.get_device_properties(place.device)
        found |= {
            "gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory,
        }  # fmt: skip
    return {"machine": found, "versions": {**versions("triton", "transformers"), "torch": torch.__version__}}


def _checks(place: Place, operations: Sequence[Operation]) -> dict[str, Any]:
    """Every operator against its reference: as it would be launched, and as the first config has it."""
    from ...kernels.tuning import choose

    rows, failed = [], []
    for operation in operations:
        if why := operation.refusal(place.policy):
            rows.append({"op": operation.name, "refused": why})
            continue
        shapes = operation.small(place.policy)
        for shape in shapes if place.rehearsal else (*shapes, *operation.samples(place.policy)):
            problem = operation.problem(place.policy, shape, place.device)
            chosen = choose(operation, place.policy, shape).config
            configs = dict.fromkeys((chosen, operation.configs(place.policy, shape)[0]))
            for config in list(configs)[:1] if place.rehearsal else configs:
                row: dict[str, Any] = {"op": operation.name, "shape": shape.key, "config": config.to_json()}
                try:
                    row["error_of_allowed"] = problem.error(problem.run(config))
                    right = row["error_of_allowed"] <= 1
                except Exception as error:  # noqa: BLE001  a kernel that does not run is a finding like a wrong one
                    row["error"], right = f"{type(error).__name__}: {str(error)[:300]}", False
                rows.append(row)
                if not right:
                    failed.append(f"{operation.name} {shape.key}")
    return {"checked": len(rows), "failed": failed, "rows": rows}


def _tuning(place: Place, operations: Sequence[Operation], folder: Path) -> dict[str, Any]:
    from ...kernels import tune
    from ...kernels.tuning import FOLDER

    if place.rehearsal:
        return {"skipped": "a rehearsal measures nothing"}
    enough = time.monotonic() + TUNING_SHARE * place.left()
    lines: list[str] = []
    written: list[Path] = []
    for index, operation in enumerate(operations):
        until = time.monotonic() + (enough - time.monotonic()) / (len(operations) - index)
        written += tune.measured([operation], place.device, folder, lines.append, partial(_past, until))
    for path in written:  # what follows is measured with it
        target = FOLDER / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    return {"written": [str(path.relative_to(folder)) for path in written], "log": lines}


def _kernels(place: Place, operations: Sequence[Operation]) -> dict[str, Any]:
    from ...kernels.model_shapes import MODELS
    from . import kernels

    if place.rehearsal:
        return kernels.run(device="cpu", models=[MODELS[0].name], tokens=(1,), ops=("linear",))
    names = [model.name for model in MODELS[1:]] + [MODELS[0].name]
    return kernels.run(device=str(place.device), models=names, tokens=kernels.TOKENS, enough=lambda: place.left() < 10)


def _past(until: float) -> bool:
    return time.monotonic() > until


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m motley.replicas.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end after so long (480)")
    parser.add_argument("--rehearse", metavar="CC", help="no GPU: the steps alone, with the kernels of 6.1, say")
    parser.add_argument("--op", action="append", default=[], help="operator; may be repeated; default: all")
    given = parser.parse_args(arguments)
    major, _, minor = (given.rehearse or "").partition(".")
    passed = run(given.out, given.seconds, (int(major), int(minor)) if given.rehearse else None, given.op)
    print(f"written to {given.out}: " + ("every check passed" if passed else "some checks FAILED, see checks.json"))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
