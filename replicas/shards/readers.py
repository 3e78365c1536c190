"""Which process digests which bytes of the weights: one that reads them anyway, so that none reads for that alone.

All that is told from what every process knows: the config, the format, the headers, and how the model is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..checkpoint import Checkpoint
from ..contents import Tensors, pieces_of
from ..layout import EMBEDDING, HEAD, decoder_layout, head_format, head_is_tied, head_spec, layer_spec
from ..quantization.base import Format, LinearSpec, Span
from ..safetensors_file import TensorInfo
from ..weights import Outline, rows_of
from .split import Split, split
from .stages import Stage, stages_of

__all__ = ["Readers", "owners", "reads"]

Spans = Mapping[str, Span]  # by tensor, bytes [first, last) of it


@dataclass(frozen=True, slots=True)
class Readers:
    """The processes that digest the same files together: of a host, or all.

    layers     of each stage of the model
    ranks      of each stage
    processes  by their numbers, stage after stage and of each its ranks
    number     of this process, which is one of them
    """

    layers: tuple[int, ...]
    ranks: int
    processes: tuple[int, ...]
    number: int

    def __post_init__(self) -> None:
        assert self.number in self.processes
        assert all(0 <= each < len(self.layers) * self.ranks for each in self.processes)

    @property
    def own(self) -> int:
        """Which of `processes` this one is."""
        return self.processes.index(self.number)

    @property
    def is_first(self) -> bool:
        return self.own == 0


def owners(checkpoint: Checkpoint, names: Iterable[str], readers: Readers) -> list[int]:
    """Of every piece of these tensors, by name and in order, which of the processes digests it: the one that reads
    most of it; of several that read as much, or where none reads any, the one that has the fewest bytes."""
    read = reads(checkpoint, readers)
    sizes: list[int] = []
    may: list[Sequence[int]] = []
    for name in sorted(names):
        spans = {number: each[name] for number, each in enumerate(read) if name in each}
        start = checkpoint.tensors[name][1].begin
        for piece in pieces_of(checkpoint.tensors, [name]):
            begin, end = piece.begin - start, piece.end - start
            parts = {number: min(end, last) - max(begin, first) for number, (first, last) in spans.items()}
            most = max(parts.values(), default=0)
            sizes.append(end - begin)
            may.append([number for number in parts if parts[number] == most] if most > 0 else range(len(read)))
    found, nbytes = [0] * len(may), [0] * len(read)
    for piece_number in sorted(range(len(may)), key=lambda each: len(may[each]) > 1):  # what is free evens out the rest
        owner = min(may[piece_number], key=lambda number: (nbytes[number], number))
        nbytes[owner] += sizes[piece_number]
        found[piece_number] = owner
    return found


def reads(checkpoint: Checkpoint, readers: Readers) -> list[Spans]:
    """What each of the processes reads when it loads: of tensors of which it reads columns, all."""
    config, format = checkpoint.config, checkpoint.format
    stages, ranks = stages_of(config.num_layers, readers.layers), readers.ranks
    parts = [split(config, format, rank, ranks) for rank in range(ranks)] if ranks > 1 else [None]
    known = [_Linears(checkpoint.tensors) for _ in parts]
    where = [divmod(number, ranks) for number in readers.processes]
    return [dict(_reads(checkpoint, stages[stage], parts[rank], known[rank])) for stage, rank in where]


def _reads(checkpoint: Checkpoint, stage: Stage, part: Split | None, known: _Linears) -> Iterator[tuple[str, Span]]:
    config, format, tensors = checkpoint.config, checkpoint.format, checkpoint.tensors
    layout = decoder_layout(config, format, stage)
    if part is None:
        yield from ((name, (0, tensors[name][1].nbytes)) for name in layout if name in tensors)
        return
    linears = [
        (format, linear)
        for index in range(*stage.layers)
        for linear in part.of_layer(layer_spec(config, index), config.head_dim).linears
    ]
    if stage.is_last and not head_is_tied(config, format):
        linears.append((head_format(format), part.of_head(head_spec(config))))
    divided = {name for each, linear in linears for name in each.tensors(linear)}
    for name in layout:
        if name in tensors and name not in divided:
            rows = (slice(*part.tokens),) if name in (EMBEDDING, f"{HEAD}.weight") else ()
            yield name, _span(tensors[name][1], rows)
    for each, linear in linears:
        yield from known.reads(each, linear)


class _Linears:
    """What formats take of linears of one rank. Those that are alike are looked at once."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._noting = _Noting(tensors, torch.device("meta"))
        self._known: dict[object, Sequence[tuple[str, Span]]] = {}

    def reads(self, format: Format, linear: LinearSpec) -> Iterator[tuple[str, Span]]:
        names = [name for name in format.tensors(linear) if name in self._tensors]
        at = len(linear.name)
        assert all(name.startswith(linear.name) for name in names), "tensors of a linear begin with its name"
        infos = [self._tensors[name][1] for name in names]
        alike = tuple((name[at:], info.dtype, info.shape) for name, info in zip(names, infos, strict=True))
        key = (replace(linear, name=""), alike)
        if key not in self._known:
            self._noting.parts.clear()
            format.linear(self._noting, linear, torch.float32)
            taken = self._noting.parts.items()
            self._known[key] = [(name[at:], _span(self._tensors[name][1], part)) for name, part in taken]
        for suffix, span in self._known[key]:
            yield f"{linear.name}{suffix}", span


class _Noting(Outline):
    """Notes what is taken. parts: of each tensor."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        super().__init__(tensors, device)
        self.parts: dict[str, tuple[slice, ...]] = {}

    def take(self, name: str, *part: slice) -> torch.Tensor:
        self.parts[name] = part
        return super().take(name, *part)


def _span(info: TensorInfo, part: Sequence[slice]) -> Span:
    """Bytes that are read for such a part: of columns the pages of all."""
    rows = rows_of(info.shape, part)
    if rows is None:
        return 0, info.nbytes
    row_bytes = info.nbytes // max(1, prod(info.shape[:1]))
    return rows[0] * row_bytes, rows[1] * row_bytes
