"""Benchmark `motley bench engine`: prefill and decode rates of the serving engine, beside the peers that are
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from motley.replicas.engine_config import MAX_DRAFTS
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import machine, row, versions

from ..checkpoints.random_checkpoint import SHAPES, write_gptq
from ..sides.side_handles import PEERS, SideProcess, is_installed

Progress = Callable[[str, int, int], None]  # name of the current step, number of steps begun, total number of steps
Samples = dict[str, list[float]]  # name of a side -> its samples

_PACKAGES = ("motley", "torch", "transformers", "llama-cpp-python")
_STEPS = 8  # decode steps of one side before the next side has its turn


def run(
    shape: str = "qwen2-0.5b",
    batches: Sequence[int] = (1, 8, 32),
    peers: Sequence[str] = PEERS,
    prompt_tokens: int = 512,
    output_tokens: int = 64,
    context_tokens: int = 64,
    threads: int | None = None,
    repeats: int = 5,
    quick: bool = False,
    speculate_ngram: int = 0,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run `motley bench engine` and return its report.

    shape            name in SHAPES; a checkpoint of this shape with random weights is made once and kept
    batches          numbers of sequences that decode together
    prompt_tokens    length of the prompt whose prefill is measured `repeats` times
    output_tokens    tokens that each side decodes for each sequence of a batch, after `context_tokens` in KV
    threads          threads of each side; None takes the cores that this process may use
    quick            measure a smaller shape and less of everything: takes less than a minute on two cores
    speculate_ngram  decode once more with at most so many n-gram drafts per step; how many are accepted depends on the
                     text, and a model of random weights repeats itself more than most

    Raises ValueError for an unknown shape or peer, SideError if a side breaks.
    """
    if quick:
        shape, prompt_tokens, output_tokens, repeats = "quick", min(prompt_tokens, 128), 8, 2
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is not known; expected {' or '.join(SHAPES)}")
    if not 0 <= speculate_ngram <= MAX_DRAFTS:
        raise ValueError(f"speculate_ngram: {speculate_ngram} is not accepted; expected 0 to {MAX_DRAFTS}")
    threads = threads or usable_cores()
    installed = [name for name in peers if is_installed(name)]
    absent = [name for name in peers if name not in installed]
    names = ("motley", *installed)
    begin = _EngineBenchProgress(
        progress, _count(len(names), len(batches), output_tokens, repeats, speculate_ngram > 0)
    )
    before, folder = machine(), _checkpoint(shape, begin)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        begin(f"loading {', '.join(names)}")
        sides = {name: stack.enter_context(SideProcess(name, folder, threads)) for name in names}
        for side in sides.values():
            side.wait_until_loaded()
        common = {"shape": shape, "threads": threads}
        samples = _prefill(sides, prompt_tokens, repeats, begin)
        workload = {**common, "prompt_tokens": prompt_tokens}
        rows += _rows("prefill", workload, "tokens/s", samples, prompt_tokens, absent)
        for batch in batches:
            samples = _decode(sides, batch, context_tokens, output_tokens, begin)
            workload = {**common, "batch": batch, "context_tokens": context_tokens}
            rows += _rows("decode", workload, "tokens/s", samples, batch, absent)
            begin(f"bare model and profile at batch {batch}")
            rows += _inside(sides["motley"], workload, samples["motley"])
            if speculate_ngram:
                begin(f"drafts at batch {batch}")
                rows += _drafted(sides["motley"], workload, output_tokens, speculate_ngram)
        rows += _bytes_per_token(sides, common, absent)
        described = {name: side.description for name, side in sides.items()}
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {
        "bench": "engine",
        "machine": before | after,
        "versions": versions(*_PACKAGES),
        "sides": described,
        "rows": rows,
    }


class _EngineBenchProgress:
    """Counter of steps that reports the name of each step that begins, its number and the total."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0

    def __call__(self, what: str) -> None:
        self._begun += 1
        self._progress(what, self._begun, self._total)


def _count(sides: int, batches: int, output_tokens: int, repeats: int, drafts: bool) -> int:
    """Return the number of steps that `run` begins."""
    return 2 + sides * (repeats + 1) + batches * (sides * (1 + _turns(output_tokens)) + 1 + drafts)


def _turns(output_tokens: int) -> int:
    return -(-output_tokens // _STEPS)


def _checkpoint(shape: str, begin: Callable[[str], None]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "motley" / "bench" / shape
    missing = not (folder / "config.json").exists()  # written last
    begin(f"writing a random checkpoint of {shape} to {folder}" if missing else f"checkpoint of {shape}")
    if missing:
        write_gptq(SHAPES[shape], folder)
    return folder


def _prefill(sides: dict[str, SideProcess], tokens: int, repeats: int, begin: Callable[[str], None]) -> Samples:
    samples: Samples = {name: [] for name in sides}
    for repeat in range(repeats + 1):  # the first warms up
        for name, side in sides.items():
            begin(f"prefill of {tokens} tokens: {name}")
            seconds = side.ask("prefill", tokens=tokens)
            if repeat:
                samples[name].append(seconds)
    return samples


def _decode(
    sides: dict[str, SideProcess], batch: int, context: int, tokens: int, begin: Callable[[str], None]
) -> Samples:
    """Return the seconds of each decode step by side.

    The sides take turns every few steps, since the load of the machine changes.
    """
    samples: Samples = {name: [] for name in sides}
    for name, side in sides.items():
        begin(f"prompts at batch {batch}: {name}")
        side.ask("open", batch=batch, context=context)
        side.ask("decode", steps=2)  # warms up
    for _ in range(_turns(tokens)):
        for name, side in sides.items():
            begin(f"decode at batch {batch}: {name}")
            samples[name] += side.ask("decode", steps=_STEPS)
    for side in sides.values():
        side.ask("close")
    return samples


def _rows(
    metric: str, workload: dict[str, Any], unit: str, seconds: Samples, work: int, absent: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row of rates, `work` / seconds, for each peer (also for those not installed), or one row if there is no
    peer.
    """
    rates = {name: [work / each for each in times] for name, times in seconds.items()}
    ours = rates.pop("motley")
    rows = [row(metric, workload, unit, ours, peer=name, peer_samples=theirs) for name, theirs in rates.items()]
    rows += [row(metric, workload, unit, ours, peer=name) for name in absent]
    return rows or [row(metric, workload, unit, ours)]


def _inside(motley: SideProcess, workload: dict[str, Any], engine: list[float]) -> list[dict[str, Any]]:
    """Return rows that compare the engine's decode step with the bare model's, and show the share of each operator."""
    sizes = {"batch": workload["batch"], "context": workload["context_tokens"], "steps": max(_STEPS, len(engine) // 2)}
    bare = motley.ask("bare", **sizes)
    rows = [
        row("decode step, engine", workload, "ms", [each * 1e3 for each in engine]),
        row("decode step, bare model", workload, "ms", [each * 1e3 for each in bare]),
    ]
    spent = motley.ask("profile", **sizes)
    whole = spent.pop("step")
    spent["rest"] = whole - sum(spent.values())
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        rows.append(row("profile", {"batch": workload["batch"], "op": name}, "of the step", [seconds / whole]))
    return rows


def _drafted(motley: SideProcess, workload: dict[str, Any], tokens: int, drafts: int) -> list[dict[str, Any]]:
    """Return rows for decode with n-gram drafts: its rate, the share of drafts accepted, and tokens per step."""
    sizes = {"batch": workload["batch"], "context": workload["context_tokens"], "tokens": tokens, "drafts": drafts}
    found = motley.ask("drafted", **sizes)
    workload = {**workload, "drafts": drafts}
    tried, right = found["drafted"], found["accepted"]
    return [
        row("decode with drafts", workload, "tokens/s", [found["tokens"] / found["seconds"]]),
        row("drafts accepted", workload, "of those tried", [right / tried if tried else 0.0]),
        row("tokens per step", workload, "of each sequence", [found["tokens"] / found["turns"]]),
    ]


def _bytes_per_token(
    sides: dict[str, SideProcess], workload: dict[str, Any], absent: Sequence[str]
) -> list[dict[str, Any]]:
    """Return rows of the bytes of weights that one token reads at batch 1: a bound on decode, whatever the kernels."""
    read = {name: [float(side.description["bytes_per_token"])] for name, side in sides.items()}
    ours = read.pop("motley")
    rows = [
        row("weights read per token", workload, "bytes", ours, peer=name, peer_samples=theirs, higher_is_better=False)
        for name, theirs in read.items()
    ]
    rows += [row("weights read per token", workload, "bytes", ours, peer=name) for name in absent]
    return rows or [row("weights read per token", workload, "bytes", ours)]
