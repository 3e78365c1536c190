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

from ..checkpoint.files.json_fields import JsonFields, parse_json
from ..errors import CheckpointError, InvalidRequest
from ..types import PROFILED_BATCH_SIZES
from .roofline_rates import LONG_CONTEXT
from .simulated_device import (
    ASSUMED_SHARES,
    RooflineShares,
    SimulatedDevice,
    SimulatedModel,
    find_model_shape,
    find_table_device,
)

__all__ = ["MeasuredStep", "MeasuredSteps", "fit_shares", "read_attained_shares", "read_measurements"]

MAX_BYTES = 16 << 20
MAX_MISFIT = 3.0  # a fit that is off by more than this factor must be of another GPU or another model
_MIN_SHARE, _MAX_SHARE = 0.01, 1.25  # shares of the roofline that are tried: a card that boosts exceeds it
_STEP_S = (1e-6, 1.0)  # seconds besides the roofline that are tried
_PRECISE = 1e-4  # relative precision of the fit


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Workload of one measured step, as the arguments of `SimulatedDevice.step_s`."""

    decodes: int = 0
    context: float = 0.0
    prefill: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Consecutive steps, and the seconds that they took together.

    model  name of the model that was measured; empty if the file does not say
    """

    steps: tuple[MeasuredStep, ...]
    seconds: float
    model: str = ""


def read_attained_shares(path: Path, gpu: str, model: str | None = None) -> RooflineShares:
    """Return the shares that the named GPU attains by a file's measurements.

    model  name of the model that was measured, where the file does not say

    Raises InvalidRequest, which names the file and, for an error in its text, the line.
    """
    device, seen = find_table_device(gpu), list(read_measurements(path, gpu))
    shape = find_model_shape(model) if model is not None else None
    if shape is None and not all(each.model for each in seen):
        raise _file_error(path, "it does not say of which model: expected simulate_model, a name of a model shape")
    devices = [
        SimulatedDevice(device, find_model_shape(each.model) if each.model else shape or _no_steps()) for each in seen
    ]
    found, off = fit_shares(list(zip(devices, seen, strict=True)))
    if off > MAX_MISFIT:
        raise _file_error(
            path, f"what it measured is {off:.1f} times off what {device.name} could take: of another GPU?"
        )
    return replace(found, measured=path.name)


def fit_shares(seen: list[tuple[SimulatedDevice, MeasuredSteps]]) -> tuple[RooflineShares, float]:
    """Return the shares with which the roofline comes closest to the measurements, and the factor by which it is off on
    average.

    The sum of the squared logarithms of the errors is minimized. A share that no measurement depends on keeps its
    assumed value.
    """

    def error(at: RooflineShares) -> float:
        devices: dict[int, SimulatedDevice] = {}
        total = 0.0
        for device, each in seen:
            true = devices.setdefault(id(device), replace(device, attained=at))
            total += math.log(sum(_seconds(true, step) for step in each.steps) / each.seconds) ** 2
        return total

    best, lowest, width = ASSUMED_SHARES, error(ASSUMED_SHARES), 0.5
    while width > _PRECISE:
        for tried in _nearby_shares(best, width):
            if (found := error(tried)) < lowest * (1 - 1e-9):
                best, lowest = tried, found
                break
        else:
            width /= 2
    return best, math.exp(math.sqrt(lowest / len(seen)))


def _nearby_shares(at: RooflineShares, width: float) -> Iterator[RooflineShares]:
    """Yield shares that are a little larger or smaller in one value, or in two against each other, since either of two
    may bound an operator.
    """
    up, down = math.exp(width), math.exp(-width)
    for one, two, three in (
        (up, 1, 1), (down, 1, 1), (1, up, 1), (1, down, 1), (1, 1, up), (1, 1, down),
        (up, down, 1), (down, up, 1), (up, 1, up), (down, 1, down), (up, up, 1), (down, down, 1),
    ):  # fmt: skip
        yield RooflineShares(
            min(max(at.bandwidth * one, _MIN_SHARE), _MAX_SHARE),
            min(max(at.arithmetic * two, _MIN_SHARE), _MAX_SHARE),
            min(max(at.step_s * three, _STEP_S[0]), _STEP_S[1]),
        )


def _seconds(device: SimulatedDevice, step: MeasuredStep) -> float:
    return device.step_s(step.decodes, step.context, () if step.prefill is None else (step.prefill,))


def read_measurements(path: Path, gpu: str) -> Iterator[MeasuredSteps]:
    """Return a file's measurements of the named GPU. Raises InvalidRequest for a file without any, or of another
    GPU.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _file_error(path, f"it is larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise _file_error(path, str(error.strerror)) from error
    try:
        fields = parse_json(data, path.name)
        if "rows" in fields:
            _check_gpu(path, _machine(path, fields), gpu)
            found = list(_rows(path, fields))
        else:
            _check_gpu(path, str(fields.get("device_name") or ""), gpu)
            found = list(_rates(JsonFields(fields, path.name)))
    except CheckpointError as error:
        line = error.__cause__.lineno if isinstance(error.__cause__, json.JSONDecodeError) else 0
        raise _file_error(path, error.message.removeprefix(f"{path.name}: "), line) from error
    if not found:
        raise _file_error(path, "it has no measured row of decode or of the time to the first token on a GPU")
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
        raise _file_error(path, "it is of a machine without a GPU, or of a rehearsal")
    return str(machine["gpu"]) if isinstance(machine, dict) else ""


def _check_gpu(path: Path, said: str, gpu: str) -> None:
    if "simulated" in said:
        raise _file_error(path, f"it is of a simulated replica ({said}): nothing was measured")
    if not said:
        return
    try:
        same = find_table_device(said) is find_table_device(gpu)
    except InvalidRequest:
        same = False
    if not same:
        raise _file_error(path, f"it was measured on {said}; expected {find_table_device(gpu).name}")


def _rows(path: Path, fields: Mapping[str, Any]) -> Iterator[MeasuredSteps]:
    rows, sides = fields["rows"], fields.get("sides")
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise _file_error(path, "rows: expected a list of objects")
    for number, each in enumerate(rows):
        metric, about = each.get("metric"), each.get("workload")
        if each.get("source") != "measured" or metric not in ("decode", "time to first token"):
            continue
        if not isinstance(about, dict) or about.get("cut_off") or "output_tokens" not in about:
            continue
        row = JsonFields(about, path.name, f"rows[{number}].workload.")
        value = JsonFields(each, path.name, f"rows[{number}].").number("value", 1e-9, 1e9)
        batch, prompt = row.integer("batch", 1, 1 << 16), row.integer("prompt_tokens", 1, 1 << 24)
        model = str(about.get("shape"))
        if metric == "decode":  # tokens a second of all streams together, while their contexts grow
            context = batch * (prompt + row.integer("output_tokens", 1, 1 << 24) / 2)
            yield MeasuredSteps((MeasuredStep(batch, context),), batch / value, model)
        elif batch == 1:
            yield MeasuredSteps(tuple(_chunks(prompt, _chunk(sides, model))), value, model)


def _chunk(sides: Any, model: str) -> int:
    """Return the tokens of a step with which the benchmark ran Motley; 512 if the file does not say."""
    try:
        chunk = sides[f"{model} motley"]["settings"]["max_batch_tokens"]
    except (KeyError, TypeError):
        return 512
    return chunk if isinstance(chunk, int) and chunk > 0 else 512


def _chunks(tokens: int, chunk: int) -> Iterable[MeasuredStep]:
    return (MeasuredStep(prefill=(min(chunk, tokens - at), at)) for at in range(0, tokens, chunk))


def _rates(fields: JsonFields) -> Iterator[MeasuredSteps]:
    """Yield measurements from the rates of a profile: of a prompt that fills a step, of decode steps with short
    contexts, and of one with a long context.
    """
    rate = fields.number("prefill_tokens_per_s", 1e-3, 1e9)
    context_s = fields.number("context_s", 0.0, 1.0)
    chunk = fields.integer("max_batch_tokens", 1, 1 << 20, default=512)
    decode_s = fields.raw.get("decode_s")
    if not isinstance(decode_s, list) or len(decode_s) != len(PROFILED_BATCH_SIZES):
        raise fields.error(
            "decode_s",
            f"{len(PROFILED_BATCH_SIZES)} numbers, for batches of {', '.join(map(str, PROFILED_BATCH_SIZES))}",
        )
    each_s = [JsonFields({"decode_s": value}, fields.file).number("decode_s", 1e-9, 1e3) for value in decode_s]
    yield MeasuredSteps((MeasuredStep(prefill=(chunk, 0)),), chunk / rate)
    for batch, seconds in zip(PROFILED_BATCH_SIZES, each_s, strict=True):
        yield MeasuredSteps((MeasuredStep(batch, batch),), seconds)
    if context_s > 0:
        yield MeasuredSteps((MeasuredStep(1, LONG_CONTEXT),), each_s[0] + context_s * (LONG_CONTEXT - 1))


def _no_steps() -> SimulatedModel:
    raise AssertionError("a model is known")


def _file_error(path: Path, what: str, line: int = 0) -> InvalidRequest:
    return InvalidRequest(f"measured: {path}{f':{line}' if line else ''}: {what}", param="measured")
