"""Benchmark `motley bench shards`: decode of a model divided among processes of this host, beside one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.demo import demo_path
from motley.replicas.errors import EngineFault
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import machine, row, versions
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

from ..checkpoints.random_checkpoint import SHAPES, write_gptq
from ..processes.bench_child import BenchChild
from . import collective_sums

Progress = Callable[[str], None]

CHILD = "motley_bench.engine.parallel_decode_side"
MODELS = ("demo", "qwen2-0.5b")
ALONE = "one process"
WAYS: Mapping[str, tuple[int, int]] = {ALONE: (1, 1), "TP 2": (2, 1), "PP 2": (1, 2)}  # ranks, stages
_GROUP = 64  # group size of weights; the 448 inputs of half of qwen2-0.5b's heads are no multiple of 128


def run(
    *,
    models: Sequence[str] = MODELS,
    batches: Sequence[int] = (1, 8),
    turns: int = 5,
    steps: int = 8,
    context: int = 64,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure each way of dividing a model, and return a report with a row for each way, beside one process as its
    peer.

    The ways take turns, and each has as many threads in all.

    models   demo, or a name in SHAPES, of which an int4 checkpoint with random weights is made once and kept
    batches  numbers of sequences that decode together, after `context` tokens
    steps    tokens of each sequence in a turn
    threads  total number of threads of a way; None takes the cores that this process may use

    Further rows show the time of a sum over ranks: alone, as `motley bench exchange` measures it, and within the steps
    of rank 0, which includes waiting for the other rank.

    Raises ValueError for an unknown model, EngineFault without a C compiler or when a process ends.
    """
    for model in models:
        if model != "demo" and model not in SHAPES:
            raise ValueError(f"model: {model!r} is not known; expected demo, {', '.join(SHAPES)}")
    if load_library()[0] is None:
        raise EngineFault(load_library()[1])
    threads = threads or usable_cores()
    before, rows = machine(), []
    for model in models:
        folder = _folder(model, progress)
        config = inspect_checkpoint(folder).config
        with ExitStack() as stack:
            children = {}
            for name, (ranks, stages) in WAYS.items():
                progress(f"{model}: loading, {name}")
                arguments = str(folder), str(threads), str(ranks), str(stages)
                children[name] = stack.enter_context(BenchChild(CHILD, *arguments))
                children[name].read()
            for batch in batches:
                progress(f"{model}: decode at batch {batch}")
                workload = {"model": model, "threads": threads, "batch": batch, "context_tokens": context}
                samples = _decode(children, batch, context, steps, turns)
                for name in list(WAYS)[1:]:
                    divided = {**workload, "divided": name}
                    rows.append(
                        row("decode", divided, "tokens/s", samples[name], peer=ALONE, peer_samples=samples[ALONE])
                    )
                rows += _sums(children["TP 2"], {**workload, "divided": "TP 2"}, config.num_layers, steps, turns)
                for child in children.values():
                    _call(child, "close")
        rows += [_exchange(model, config.hidden_size, batch, turns, progress) for batch in batches]
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {"bench": "shards", "machine": before | after, "versions": versions("motley", "torch"), "rows": rows}


def _folder(model: str, progress: Progress) -> Path:
    if model == "demo":
        return demo_path()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "motley" / "bench" / f"{model}-g{_GROUP}"
    if not (folder / "config.json").exists():  # written last
        progress(f"writing a random checkpoint of {model} to {folder}")
        write_gptq(SHAPES[model], folder, group_size=_GROUP)
    return folder


def _decode(
    children: Mapping[str, BenchChild], batch: int, context: int, steps: int, turns: int
) -> dict[str, list[float]]:
    """Return the tokens per second of each turn, by way."""
    samples: dict[str, list[float]] = {name: [] for name in children}
    for child in children.values():
        _call(child, "open", batch=batch, context=context)
    for turn in range(turns + 1):  # the first warms up
        for name, child in children.items():
            found = _call(child, "decode", steps=steps)
            if turn:
                samples[name].append(found["tokens"] / found["seconds"])
    return samples


def _sums(child: BenchChild, workload: dict[str, Any], layers: int, steps: int, turns: int) -> list[dict[str, Any]]:
    """Return rows of how much of a step rank 0 spends in sums over ranks, including its waiting for the other rank."""
    found = [_call(child, "sums", steps=steps) for _ in range(turns)]
    assert all(each["sums"] == (2 * layers + 1) * each["steps"] for each in found), "two of each layer, and one more"
    shares = [each["sum_s"] / each["seconds"] for each in found]
    step = [each["sum_s"] / each["steps"] * 1e3 for each in found]
    return [
        row("in sums, rank 0", workload, "of the step", shares, higher_is_better=False),
        row("in sums, rank 0", workload, "ms of each step", step, higher_is_better=False),
    ]


def _exchange(model: str, hidden: int, batch: int, turns: int, progress: Progress) -> dict[str, Any]:
    """Return the row of a sum, in fp32, of as many numbers as a step has hidden states."""
    [found] = collective_sums.run(ranks=2, sizes=[4 * hidden * batch], turns=turns, progress=progress)["rows"]
    return {**found, "workload": {"model": model, "batch": batch, **found["workload"]}}


def _call(child: BenchChild, do: str, **arguments: Any) -> dict[str, Any]:
    child.write({"do": do, **arguments})
    return child.read()
