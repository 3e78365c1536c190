"""Choice of which process digests which bytes of the weights: one that reads them anyway, so that no byte is read only
to be digested.

Every process makes the same choice, from what all know: the config, the format, the headers, and the division.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..checkpoint.files.safetensors_header import TensorInfo
from ..checkpoint.reading.weight_digests import Tensors, tensor_pieces
from ..checkpoint.reading.weight_loader import MetaWeightLoader, rows_of_part
from ..model.checkpoint_inspection import Checkpoint
from ..model.sharding.split import TensorShard, shard_for_rank
from ..model.sharding.stages import PipelineStage, pipeline_stages
from ..model.tensor_layout import EMBEDDING, HEAD, decoder_layout, head_format, head_is_tied, head_spec
from ..quantization.weight_format import LinearSpec, Span, WeightFormat

__all__ = ["DigestReaders", "assign_digests", "reads_by_process"]

Spans = Mapping[str, Span]  # bytes [first, last) of each tensor, by name


@dataclass(frozen=True, slots=True)
class DigestReaders:
    """Processes that digest the same files together: those of one host, or all.

    layers     layers of each stage of the model
    ranks      ranks of each stage
    processes  their numbers, which count all processes stage by stage and within each by rank
    number     number of this process, which is one of them
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
        """Index of this process among those that digest the same files."""
        return self.processes.index(self.number)

    @property
    def is_first(self) -> bool:
        return self.own == 0


def assign_digests(checkpoint: Checkpoint, names: Iterable[str], readers: DigestReaders) -> list[int]:
    """Return for every piece of these tensors, sorted by name and in order, the index of the process that digests it.

    That is the process which reads most of the piece. Where several read as much, or none reads any, it is the one
    which has the fewest bytes to digest.
    """
    read = reads_by_process(checkpoint, readers)
    sizes: list[int] = []
    may: list[Sequence[int]] = []
    for name in sorted(names):
        spans = {number: each[name] for number, each in enumerate(read) if name in each}
        start = checkpoint.tensors[name][1].begin
        for piece in tensor_pieces(checkpoint.tensors, [name]):
            begin, end = piece.begin - start, piece.end - start
            parts = {number: min(end, last) - max(begin, first) for number, (first, last) in spans.items()}
            max_bytes = max(parts.values(), default=0)
            sizes.append(end - begin)
            may.append(
                [number for number in parts if parts[number] == max_bytes] if max_bytes > 0 else range(len(read))
            )
    found, nbytes = [0] * len(may), [0] * len(read)
    for piece_number in sorted(range(len(may)), key=lambda each: len(may[each]) > 1):  # pieces with a choice come last
        owner = min(may[piece_number], key=lambda number: (nbytes[number], number))
        nbytes[owner] += sizes[piece_number]
        found[piece_number] = owner
    return found


def reads_by_process(checkpoint: Checkpoint, readers: DigestReaders) -> list[Spans]:
    """Return the byte ranges of each tensor that each process reads when it loads; of a tensor of which it reads
    columns, all.
    """
    config, format = checkpoint.config, checkpoint.format
    stages, ranks = pipeline_stages(config.num_layers, readers.layers), readers.ranks
    parts = [shard_for_rank(config, format, rank, ranks) for rank in range(ranks)] if ranks > 1 else [None]
    linear_reads = [_LinearReads(checkpoint.tensors) for _ in parts]
    where = [divmod(number, ranks) for number in readers.processes]
    return [dict(_reads(checkpoint, stages[stage], parts[rank], linear_reads[rank])) for stage, rank in where]


def _reads(
    checkpoint: Checkpoint, stage: PipelineStage, part: TensorShard | None, linear_reads: _LinearReads
) -> Iterator[tuple[str, Span]]:
    config, format, tensors = checkpoint.config, checkpoint.format, checkpoint.tensors
    layout = decoder_layout(config, format, stage)
    if part is None:
        yield from ((name, (0, tensors[name][1].nbytes)) for name in layout if name in tensors)
        return
    linears = [(format, linear) for plan in stage.of_config(part.config).layers for linear in plan.specs]
    if stage.is_last and not head_is_tied(config, format):
        linears.append((head_format(format), part.of_head(head_spec(config))))
    divided = {name for each, linear in linears for name in each.tensors(linear)}
    for name in layout:
        if name in tensors and name not in divided:
            rows = (slice(*part.tokens),) if name in (EMBEDDING, f"{HEAD}.weight") else ()
            yield name, _span(tensors[name][1], rows)
    for each, linear in linears:
        yield from linear_reads.reads(each, linear)


class _LinearReads:
    """Cache of which parts of linears' tensors a rank reads; equal linears are looked up once."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._recorder = _ReadRecorder(tensors, torch.device("meta"))
        self._cache: dict[object, Sequence[tuple[str, Span]]] = {}

    def reads(self, format: WeightFormat, linear: LinearSpec) -> Iterator[tuple[str, Span]]:
        names = [name for name in format.tensors(linear) if name in self._tensors]
        at = len(linear.name)
        assert all(name.startswith(linear.name) for name in names), "tensors of a linear begin with its name"
        infos = [self._tensors[name][1] for name in names]
        alike = tuple((name[at:], info.dtype, info.shape) for name, info in zip(names, infos, strict=True))
        key = (replace(linear, name=""), alike)
        if key not in self._cache:
            self._recorder.parts.clear()
            format.linear(self._recorder, linear, torch.float32)
            taken = self._recorder.parts.items()
            self._cache[key] = [(name[at:], _span(self._tensors[name][1], part)) for name, part in taken]
        for suffix, span in self._cache[key]:
            yield f"{linear.name}{suffix}", span


class _ReadRecorder(MetaWeightLoader):
    """Outline of the tensors that records which part of each is taken.

    parts  slices that were taken of each tensor, by name
    """

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        super().__init__(tensors, device)
        self.parts: dict[str, tuple[slice, ...]] = {}

    def take(self, name: str, *part: slice) -> torch.Tensor:
        self.parts[name] = part
        return super().take(name, *part)


def _span(info: TensorInfo, part: Sequence[slice]) -> Span:
    """Return the range of bytes that are read for a part of a tensor: all of them where it selects columns, since their
    pages are read anyway.
    """
    rows = rows_of_part(info.shape, part)
    if rows is None:
        return 0, info.nbytes
    row_bytes = info.nbytes // max(1, prod(info.shape[:1]))
    return rows[0] * row_bytes, rows[1] * row_bytes
