"""Measurements of concurrent streams on a GPU, group by group, each side in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..processes.bench_child import ChildEnded, ChildSilent
from ..processes.task_process import START_S, TaskProcess
from .engine_gpu_rows import rows_of

CHILD = "motley_bench.sides.gpu_side_process"
MAX_STREAMS = 256  # maximum number of concurrent streams
IDLE_PROMPT, IDLE_BATCHES = 128, (1, 64)
_STEPS, _REPEATS = 32, 3  # number of a peer's decode steps and of its prefills
_GRACE_S = 15.0  # additional seconds in which a task may notice that its time is over


@dataclass(frozen=True, slots=True)
class StreamWorkload:
    """Streams of equal lengths that are sent at once.

    batch  number of streams; 0: as many as fit into KV, at most MAX_STREAMS
    """

    batch: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadGroup:
    """Measurements that one process makes of one side.

    idle    batch sizes whose decode is traced to find the GPU's idle time
    until   share of the whole time at which the group ends
    drafts  maximum number of drafts per step with which the streams run once more; 0: they do not
    """

    shape: str
    side: str
    cells: tuple[StreamWorkload, ...]
    idle: tuple[int, ...] = ()
    until: float = 1.0
    drafts: int = 0


class EngineMeasurement:
    """Measurements of groups, with all that they have found so far.

    device    "cuda", or "cpu" for a rehearsal
    out       folder for traces
    left      returns the seconds that are left until a given share of the time
    progress  called with a line about what is being done
    found     results, errors, and measurements that were skipped; `late` marks those skipped for lack of time
    cut       measurements that time did not reach
    sides     description that each side has given of itself, by "shape side"
    """

    def __init__(
        self,
        device: str,
        out: Path,
        left: Callable[[float], float],
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.found: list[dict[str, Any]] = []
        self.cut: list[dict[str, Any]] = []
        self.sides: dict[str, dict[str, Any]] = {}
        self._device, self._out, self._left, self._progress = device, out, left, progress

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.found, self.sides, real=self._device != "cpu")

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [each for each in self.found if "error" in each]

    @property
    def complete(self) -> bool:
        """Whether nothing failed, was skipped for lack of time or was cut off."""
        return not any(map(_is_cut, self.found)) and not self.cut and not self.failed

    def turn(self, left: Callable[[float], float]) -> None:
        """Give later measurements more time, and forget what was cut off before: the caller requests it again.

        left  returns the seconds that are left until a given share of the time
        """
        self._left, self.cut = left, []

    def group(self, group: WorkloadGroup) -> WorkloadGroup | None:
        """Measure a group; return the part of it that time did not reach, or None."""
        left = _TimeShare(self._left, group.until)
        if left() <= 0:
            self.cut.append(asdict(group))
            return group
        rest = replace(group, cells=(), idle=())
        arguments = (group.side, group.shape, self._device, *([str(group.drafts)] if group.drafts else ()))
        with TaskProcess(CHILD, *arguments, start_s=min(START_S, max(1.0, left()))) as process:
            self._progress(f"{group.shape}: {group.side} starts")
            name = f"{group.shape} {group.side}"
            try:
                process.start()
                self.sides[name] = process.about
                for what, work, of in self._tasks(group, process, left):
                    self._progress(f"{group.shape}: {group.side} {what}")
                    found = work() if left() > 0 else None
                    if found is None:
                        self.cut.append({"shape": group.shape, "side": group.side, "what": what})
                    else:
                        found_keys = set(map(_key, found))
                        self.found = [each for each in self.found if _key(each) not in found_keys] + found
                    if found is None or any(map(_is_cut, found)):
                        rest = replace(rest, cells=(*rest.cells, *of.cells), idle=(*rest.idle, *of.idle))
            except (ChildEnded, ChildSilent) as error:
                self.found.append({"shape": group.shape, "side": group.side, "what": "start", "error": error.message})
        return rest if rest.cells or rest.idle else None

    def _tasks(
        self, group: WorkloadGroup, process: TaskProcess, left: Callable[[], float]
    ) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]], WorkloadGroup]]:
        """Yield each measurement of a group: its name, the function that makes it, and a group that holds nothing else.

        The first cell comes before the traces, since it matters most.
        """
        cells = [
            (_said(cell), partial(self._cell, group, cell, process, left), replace(group, cells=(cell,), idle=()))
            for cell in group.cells
        ]
        idle = [
            (
                f"idle at batch {batch}", partial(self._idle, group, batch, process, left),
                replace(group, cells=(), idle=(batch,)),
            )
            for batch in group.idle
        ]  # fmt: skip
        yield from (*cells[:1], *idle, *cells[1:])

    def _cell(
        self, group: WorkloadGroup, cell: StreamWorkload, process: TaskProcess, left: Callable[[], float]
    ) -> list[dict[str, Any]]:
        measure: Callable[..., Iterable[dict[str, Any]]] = partial(_ours, drafts=group.drafts)
        if group.side != "motley":
            measure = partial(_theirs, compiling=self._device != "cpu")
        about = {"shape": group.shape, "side": group.side, "what": "streams", **asdict(cell)}
        return [{**about, **each} for each in measure(process, cell, left)]

    def _idle(
        self, group: WorkloadGroup, batch: int, process: TaskProcess, left: Callable[[], float]
    ) -> list[dict[str, Any]]:
        folder = str(self._out / "traces" / group.shape)
        response = process.ask("idle", left() + _GRACE_S, batch=batch, prompt_tokens=IDLE_PROMPT, folder=folder)
        return [{"shape": group.shape, "side": group.side, "what": "idle", "batch": batch, **_flat(response)}]


def _is_cut(found: dict[str, Any]) -> bool:
    return bool(found.get("late")) or found.get("complete") is False


def _key(found: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a measurement; a repetition of the measurement has the same."""
    names = ("shape", "side", "what", "batch", "prompt_tokens", "output_tokens", "variant")
    return tuple(found.get(name) for name in names)


class _TimeShare:
    def __init__(self, left: Callable[[float], float], share: float) -> None:
        self._left, self._share = left, share

    def __call__(self) -> float:
        return self._left(self._share)


def _ours(
    process: TaskProcess, cell: StreamWorkload, left: Callable[[], float], *, drafts: int
) -> Iterable[dict[str, Any]]:
    lengths = {"prompt_tokens": cell.prompt_tokens, "output_tokens": cell.output_tokens}
    capacity = process.ask("max_streams", **lengths)
    if "error" in capacity:
        yield capacity
        return
    max_streams = min(MAX_STREAMS, capacity["result"])
    if cell.batch > max_streams or not max_streams:
        yield {"skipped": f"there is room for {max_streams} streams of that length"}
        return
    sizes = {"batch": cell.batch or max_streams, **lengths}
    warmed = process.ask("warm", left() + _GRACE_S, **sizes)
    if "error" in warmed or left() <= 0:
        yield {**sizes, **_flat(warmed), "skipped": "no time was left after kernels were compiled", "late": True}
        return
    response = process.ask("run", left() + _GRACE_S, within_s=left(), **sizes)
    yield {**sizes, "warmed": warmed["result"], **_flat(response)}
    if drafts and left() <= 0:
        yield {"what": "drafted", **sizes, "skipped": "no time was left", "late": True}
    elif drafts:
        yield {"what": "drafted", **sizes, **_flat(process.ask("drafted", left() + _GRACE_S, within_s=left(), **sizes))}


def _theirs(
    process: TaskProcess, cell: StreamWorkload, left: Callable[[], float], *, compiling: bool
) -> Iterable[dict[str, Any]]:
    """Yield a peer's results: prefill at batch 1, then decode without and with torch.compile, as far as time allows.

    compiling  whether decode is also measured compiled; False in a rehearsal, where compiling would take longer than
               all else
    """
    if cell.batch == 1:
        response = process.ask("prefill", left() + _GRACE_S, tokens=cell.prompt_tokens, repeats=_REPEATS)
        yield {"variant": "prefill", "seconds": response.pop("result", None), **response}
    for compiled in (False, True) if compiling else (False,):
        variant = "compiled" if compiled else "as it comes"
        if left() <= 0:
            yield {"variant": variant, "skipped": "no time was left", "late": True}
            continue
        response = process.ask(
            "decode", left() + (0.0 if compiled else _GRACE_S), batch=cell.batch, context_tokens=cell.prompt_tokens,
            output_tokens=max(cell.output_tokens, 8), steps=_STEPS, compiled=compiled, within_s=left(),
        )  # fmt: skip
        yield {"variant": variant, **_flat(response)}


def _flat(response: dict[str, Any]) -> dict[str, Any]:
    return {**response.pop("result", {}), **response}


def _said(cell: StreamWorkload) -> str:
    return f"{cell.prompt_tokens}/{cell.output_tokens} at batch {cell.batch or 'as large as fits'}"
