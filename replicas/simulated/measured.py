"""Measurements of a real replica on a GPU, for simulated ones to use: reading of files, and fitting of shares to them.

It reads JSON files of `motley bench engine` and `motley bench gpu` (streams.json), of their rows those of decode and of
the time to the first token; and the rates of a replica's profile: prefill_tokens_per_s, decode_s and context_s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.launch.model_shapes import ModelShape
from ..errors import CheckpointError, InvalidRequest
from ..json_file import Fields, parse_json
from ..protocol import BATCHES
from .device import ASSUMED, Attained, SimulatedDevice, device_named, model_named
from .reckoned import LONG

__all__ = ["Seen", "Step", "attained", "fitted", "read_seen"]

MAX_BYTES = 16 << 20
WORST = 3.0  # a fit that is off by more than this factor must be of another GPU or another model
_LEAST, _MOST = 0.01, 1.25  # shares of the roofline that are tried: a card that boosts exceeds it
_STEP_S = (1e-6, 1.0)  # seconds besides the roofline that are tried
_PRECISE = 1e-4  # relative precision of the fit


@dataclass(frozen=True, slots=True)
class Step:
    """Workload of one measured step, as the arguments of `SimulatedDevice.step_s`."""

    decodes: int = 0
    context: float = 0.0
    prefill: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """Consecutive steps, and the seconds that they took together.

    model  name of the model that was measured; empty if the file does not say
    """

    steps: tuple[Step, ...]
    seconds: float
    model: str = ""


def attained(path: Path, gpu: str, model: str | None = None) -> Attained:
    """Return the shares that the named GPU attains by a file's measurements.

    model  name of the model that was measured, where the file does not say

    Raises InvalidRequest, which names the file and, for an error in its text, the line.
    """
    device, seen = device_named(gpu), list(read_seen(path, gpu))
    told = model_named(model) if model is not None else None
    if told is None and not all(each.model for each in seen):
        raise _wrong(path, "it does not say of which model: expected simulate_model, a name of a model shape")
    devices = [SimulatedDevice(device, model_named(each.model) if each.model else told or _none()) for each in seen]
    found, off = fitted(list(zip(devices, seen, strict=True)))
    if off > WORST:
        raise _wrong(path, f"what it measured is {off:.1f} times off what {device.name} could take: of another GPU?")
    return replace(found, measured=path.name)


def fitted(seen: list[tuple[SimulatedDevice, Seen]]) -> tuple[Attained, float]:
    """Return the shares with which the roofline comes closest to the measurements, and the factor by which it is off on
    average.

    The sum of the squared logarithms of the errors is minimized. A share that no measurement depends on keeps its
    assumed value.
    """

    def error(at: Attained) -> float:
        devices: dict[int, SimulatedDevice] = {}
        total = 0.0
        for device, each in seen:
            true = devices.setdefault(id(device), replace(device, attained=at))
            total += math.log(sum(_seconds(true, step) for step in each.steps) / each.seconds) ** 2
        return total

    best, least, width = ASSUMED, error(ASSUMED), 0.5
    while width > _PRECISE:
        for tried in _around(best, width):
            if (found := error(tried)) < least * (1 - 1e-9):
                best, least = tried, found
                break
        else:
            width /= 2
    return best, math.exp(math.sqrt(least / len(seen)))


def _around(at: Attained, width: float) -> Iterator[Attained]:
    """Yield shares that are a little larger or smaller in one value, or in two against each other, since either of two
    may bound an operator.
    """
    up, down = math.exp(width), math.exp(-width)
    for one, two, three in (
        (up, 1, 1), (down, 1, 1), (1, up, 1), (1, down, 1), (1, 1, up), (1, 1, down),
        (up, down, 1), (down, up, 1), (up, 1, up), (down, 1, down), (up, up, 1), (down, down, 1),
    ):  # fmt: skip
        yield Attained(
            min(max(at.bandwidth * one, _LEAST), _MOST),
            min(max(at.arithmetic * two, _LEAST), _MOST),
            min(max(at.step_s * three, _STEP_S[0]), _STEP_S[1]),
        )


def _seconds(device: SimulatedDevice, step: Step) -> float:
    return device.step_s(step.decodes, step.context, () if step.prefill is None else (step.prefill,))


def read_seen(path: Path, gpu: str) -> Iterator[Seen]:
    """Return a file's measurements of the named GPU. Raises InvalidRequest for a file without any, or of another
    GPU.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _wrong(path, f"it is larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(path, str(error.strerror)) from error
    try:
        fields = parse_json(data, path.name)
        if "rows" in fields:
            _check_gpu(path, _machine(path, fields), gpu)
            found = list(_rows(path, fields))
        else:
            _check_gpu(path, str(fields.get("device_name") or ""), gpu)
            found = list(_rates(Fields(fields, path.name)))
    except CheckpointError as error:
        line = error.__cause__.lineno if isinstance(error.__cause__, json.JSONDecodeError) else 0
        raise _wrong(path, error.message.removeprefix(f"{path.name}: "), line) from error
    if not found:
        raise _wrong(path, "it has no measured row of decode or of the time to the first token on a GPU")
    return iter(found)


def _machine(path: Path, fields: Mapping[str, Any]) -> str:
    """Return the GPU's name in the file, or in the file beside it that `motley bench gpu` writes; empty if neither
    says.
    """
    machine = fields.get("machine")
    beside = path.with_name("machine.json")
    if machine is None and beside.is_file():
        machine = parse_json(beside.read_bytes(), beside.name).get("machine")
    if isinstance(machine, dict) and "gpu" not in machine:
        raise _wrong(path, "it is of a machine without a GPU, or of a rehearsal")
    return str(machine["gpu"]) if isinstance(machine, dict) else ""


def _check_gpu(path: Path, said: str, gpu: str) -> None:
    if "simulated" in said:
        raise _wrong(path, f"it is of a simulated replica ({said}): nothing was measured")
    if not said:
        return
    try:
        same = device_named(said) is device_named(gpu)
    except InvalidRequest:
        same = False
    if not same:
        raise _wrong(path, f"it was measured on {said}; expected {device_named(gpu).name}")


def _rows(path: Path, fields: Mapping[str, Any]) -> Iterator[Seen]:
    rows, sides = fields["rows"], fields.get("sides")
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise _wrong(path, "rows: expected a list of objects")
    for number, each in enumerate(rows):
        metric, about = each.get("metric"), each.get("workload")
        if each.get("source") != "measured" or metric not in ("decode", "time to first token"):
            continue
        if not isinstance(about, dict) or about.get("cut_off") or "output_tokens" not in about:
            continue
        row = Fields(about, path.name, f"rows[{number}].workload.")
        value = Fields(each, path.name, f"rows[{number}].").number("value", 1e-9, 1e9)
        batch, prompt = row.integer("batch", 1, 1 << 16), row.integer("prompt_tokens", 1, 1 << 24)
        model = str(about.get("shape"))
        if metric == "decode":  # tokens a second of all streams together, while their contexts grow
            context = batch * (prompt + row.integer("output_tokens", 1, 1 << 24) / 2)
            yield Seen((Step(batch, context),), batch / value, model)
        elif batch == 1:
            yield Seen(tuple(_chunks(prompt, _chunk(sides, model))), value, model)


def _chunk(sides: Any, model: str) -> int:
    """Return the tokens of a step with which the benchmark ran Motley; 512 if the file does not say."""
    try:
        chunk = sides[f"{model} motley"]["settings"]["max_batch_tokens"]
    except (KeyError, TypeError):
        return 512
    return chunk if isinstance(chunk, int) and chunk > 0 else 512


def _chunks(tokens: int, chunk: int) -> Iterable[Step]:
    return (Step(prefill=(min(chunk, tokens - at), at)) for at in range(0, tokens, chunk))


def _rates(fields: Fields) -> Iterator[Seen]:
    """Yield measurements from the rates of a profile: of a prompt that fills a step, of decode steps with short
    contexts, and of one with a long context.
    """
    rate = fields.number("prefill_tokens_per_s", 1e-3, 1e9)
    context_s = fields.number("context_s", 0.0, 1.0)
    chunk = fields.integer("max_batch_tokens", 1, 1 << 20, default=512)
    decode_s = fields.raw.get("decode_s")
    if not isinstance(decode_s, list) or len(decode_s) != len(BATCHES):
        raise fields.error("decode_s", f"{len(BATCHES)} numbers, for batches of {', '.join(map(str, BATCHES))}")
    each_s = [Fields({"decode_s": value}, fields.file).number("decode_s", 1e-9, 1e3) for value in decode_s]
    yield Seen((Step(prefill=(chunk, 0)),), chunk / rate)
    for batch, seconds in zip(BATCHES, each_s, strict=True):
        yield Seen((Step(batch, batch),), seconds)
    if context_s > 0:
        yield Seen((Step(1, LONG),), each_s[0] + context_s * (LONG - 1))


def _none() -> ModelShape:
    raise AssertionError("a model is known")


def _wrong(path: Path, what: str, line: int = 0) -> InvalidRequest:
    return InvalidRequest(f"measured: {path}{f':{line}' if line else ''}: {what}", param="measured")
