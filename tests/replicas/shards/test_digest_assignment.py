"""Which process of a divided model digests what: every piece by one, which reads it anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_steps import exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from thread_ranks import ThreadExchange
from tiny_checkpoints import build_checkpoint

from motley.replicas.checkpoint.reading import tensor_reader, weight_digests
from motley.replicas.checkpoint.reading.weight_digests import DigestPiece, tensor_pieces
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader, rows_of_part
from motley.replicas.loading.cached_digests import CachedDigests, digested_names
from motley.replicas.loading.digest_assignment import DigestReaders, assign_digests, reads_by_process
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from motley.replicas.model.sharding.ranks import Ranks
from motley.replicas.model.sharding.split import shard_for_rank
from motley.replicas.model.sharding.stages import pipeline_stages
from motley.replicas.model.tensor_layout import decoder_layout
from motley.replicas.quantization.weight_format import Span

LAYERS = 3
TABLE = "model.embed_tokens.weight"
FORMATS: dict[str, Callable[[Path], Path]] = {
    "qwen2": lambda folder: build_checkpoint(folder, "qwen2", num_hidden_layers=LAYERS),
    "qwen3, tied": lambda folder: build_checkpoint(folder, "qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=True),
    "gptq": lambda folder: build_gptq(folder, "qwen2", num_hidden_layers=LAYERS),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, num_hidden_layers=LAYERS),
    "gptq, head": lambda folder: build_gptq(folder, lm_head=True, num_hidden_layers=LAYERS),
    "awq, some unconverted": lambda folder: build_awq(
        folder, unconverted=("self_attn.k_proj", "layers.1.mlp.down_proj"), num_hidden_layers=LAYERS
    )[0],
    "fp8": lambda folder: build_fp8(folder, scales="rows", num_hidden_layers=LAYERS)[0],
}
DIVISIONS: list[tuple[tuple[int, ...], int]] = [((1, 2), 1), ((LAYERS,), 2), ((2, 1), 2)]


@pytest.fixture(autouse=True)
def _pieces_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 1 << 10)


def all_readers(layers: tuple[int, ...], ranks: int) -> list[DigestReaders]:
    everyone = tuple(range(len(layers) * ranks))
    return [DigestReaders(layers, ranks, everyone, number) for number in everyone]


def by_owner(checkpoint: Checkpoint, readers: DigestReaders) -> list[list[DigestPiece]]:
    found: list[list[DigestPiece]] = [[] for _ in readers.processes]
    pieces = tensor_pieces(checkpoint.tensors, digested_names(checkpoint))
    for piece, owner in zip(pieces, assign_digests(checkpoint, digested_names(checkpoint), readers), strict=True):
        found[owner].append(piece)
    return found


def loaded(folder: Path, readers: DigestReaders, found: list[Sequence[bytes]] | None = None) -> LoadedModel:
    """A process's part. found: by the others; None: it does not tell the fingerprint."""
    checkpoint = inspect_checkpoint(folder)
    stage, rank = divmod(readers.number, readers.ranks)
    parts = [shard_for_rank(checkpoint.config, checkpoint.format, each, readers.ranks) for each in range(readers.ranks)]
    ranks = Ranks(parts, rank, ThreadExchange(rank, None, [])) if readers.ranks > 1 else None  # type: ignore[arg-type]
    others = None if found is None else (lambda: found)
    known = CachedDigests(readers=readers)
    return load_model(
        folder,
        exact_ops(),
        ranks=ranks,
        stage=pipeline_stages(LAYERS, readers.layers)[stage],
        cached_digests=known,
        others=others,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_stages_digest_what_they_have(tied: bool, tmp_path: Path) -> None:
    """All of it, and of a tied table, which two have, the first or the last each piece."""
    folder = build_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    checkpoint = inspect_checkpoint(folder)
    found = by_owner(checkpoint, all_readers((1, 2), 1)[0])
    for stage, pieces in zip(pipeline_stages(LAYERS, (1, 2)), found, strict=True):
        own = decoder_layout(checkpoint.config, checkpoint.format, stage).keys() & checkpoint.tensors.keys()
        assert (TABLE in own) == (stage.is_first or tied)
        assert {piece.name for piece in pieces} - {TABLE} == own - {TABLE}
    every = Counter(tensor_pieces(checkpoint.tensors, digested_names(checkpoint)))
    assert Counter(piece for pieces in found for piece in pieces) == every
    assert TABLE in {piece.name for piece in found[0]}
    assert tied or TABLE not in {piece.name for piece in found[1]}


def test_ranks_digest_their_rows_and_of_columns_as_much_as_the_others(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(FORMATS["qwen2"](tmp_path / "model"))
    found = by_owner(checkpoint, all_readers((LAYERS,), 2)[0])
    nbytes = [sum(piece.end - piece.begin for piece in pieces) for pieces in found]
    assert abs(nbytes[0] - nbytes[1]) <= weight_digests.PIECE_BYTES
    for name in (TABLE, "lm_head.weight", "model.layers.1.mlp.gate_proj.weight"):
        info = checkpoint.tensors[name][1]
        half = info.begin + info.nbytes // 2
        for rank, pieces in enumerate(found):
            own = [piece for piece in pieces if piece.name == name]
            assert len(own) > 1
            for piece in own:
                inside = min(piece.end, half) - piece.begin if rank == 0 else piece.end - max(piece.begin, half)
                assert 2 * inside >= piece.end - piece.begin
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        of = [sum(piece.name == name for piece in pieces) for pieces in found]
        assert abs(of[0] - of[1]) <= 1 < min(of)


def test_a_piece_of_two_ranks_rows_goes_to_the_one_with_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = inspect_checkpoint(FORMATS["qwen2"](tmp_path / "model"))
    _, info = checkpoint.tensors[TABLE]
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 5 * info.nbytes // 8)
    first, second = by_owner(checkpoint, all_readers((LAYERS,), 2)[0])
    of = [[piece.begin - info.begin for piece in pieces if piece.name == TABLE] for pieces in (first, second)]
    assert of == [[0], [5 * info.nbytes // 8]]


def test_what_no_process_of_a_host_reads_they_divide(tmp_path: Path) -> None:
    """The host has to say whether its files are those of the others."""
    checkpoint = inspect_checkpoint(FORMATS["qwen2"](tmp_path / "model"))
    layers = (1, 1, 1)
    found = by_owner(checkpoint, DigestReaders(layers, 1, (1, 2), 1))
    every = [*tensor_pieces(checkpoint.tensors, digested_names(checkpoint))]
    assert Counter(piece for pieces in found for piece in pieces) == Counter(every)
    nbytes = [sum(piece.end - piece.begin for piece in pieces) for pieces in found]
    assert abs(nbytes[0] - nbytes[1]) <= weight_digests.PIECE_BYTES
    names = [{piece.name for piece in pieces} for pieces in found]
    assert TABLE in names[0]
    for stage in (1, 2):
        name = f"model.layers.{stage}.mlp.down_proj.weight"
        assert [name in each for each in names] == [stage == 1, stage == 2]
    [everything] = by_owner(checkpoint, DigestReaders(layers, 1, (2,), 2))
    assert everything == every


@pytest.mark.parametrize(("layers", "ranks"), DIVISIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_known_before_what_each_process_reads(
    name: str, layers: tuple[int, ...], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers every format, layers and head."""
    folder = FORMATS[name](tmp_path / "model")
    checkpoint = inspect_checkpoint(folder)
    taken: dict[str, Span] = {}
    whole = WeightLoader._read

    def noted(weights: WeightLoader, name: str, *part: slice, retained: bool) -> torch.Tensor:
        info = checkpoint.tensors[name][1]
        rows, row_bytes = rows_of_part(info.shape, part), info.nbytes // info.shape[0]
        taken[name] = (0, info.nbytes) if rows is None else (rows[0] * row_bytes, rows[1] * row_bytes)
        return whole(weights, name, *part, retained=retained)

    monkeypatch.setattr(WeightLoader, "_read", noted)
    every = all_readers(layers, ranks)
    for readers, expected in zip(every, reads_by_process(checkpoint, every[0]), strict=True):
        taken.clear()
        loaded(folder, readers)
        assert taken == expected


class Reads:
    """Bytes that this process has read, by tensor, and for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.for_tensors: Counter[tuple[str, int]] = Counter()
        self.for_digests: Counter[tuple[str, int]] = Counter()
        for module, into in ((tensor_reader, self.for_tensors), (weight_digests, self.for_digests)):
            monkeypatch.setattr(module, "read_piece", self._noting(into, weight_digests.read_piece))

    @staticmethod
    def _noting(found: Counter[tuple[str, int]], whole: Callable[..., None]) -> Callable[..., None]:
        def noted(piece: DigestPiece, at: int, into: memoryview, *file: Any) -> None:
            found.update((piece.path.name, byte) for byte in range(piece.begin, piece.end))
            whole(piece, at, into, *file)

        return noted

    def of(self, checkpoint: Checkpoint, found: Mapping[tuple[str, int], int]) -> Iterator[str]:
        """Tensors that have such bytes."""
        for name, (path, info) in checkpoint.tensors.items():
            if any((path.name, byte) in found for byte in range(info.begin, info.end)):
                yield name


@pytest.mark.slow("Every process of a divided model reads its part of a checkpoint")
@pytest.mark.covering
@pytest.mark.parametrize(("layers", "ranks"), DIVISIONS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3, tied", "gptq, desc_act"])
def test_the_fingerprint_is_that_of_one_process_and_nothing_of_other_stages_is_read_for_it(
    name: str, layers: tuple[int, ...], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FORMATS[name](tmp_path / "model")
    checkpoint = inspect_checkpoint(folder)
    fingerprint = load_model(folder, exact_ops()).fingerprint
    every, found = all_readers(layers, ranks), []
    stages = pipeline_stages(LAYERS, layers)
    for readers in [*every[1:], every[0]]:
        with monkeypatch.context() as patched:
            read = Reads(patched)
            made = loaded(folder, readers, None if readers.number else found)
        found.append(made.digests)
        own = decoder_layout(checkpoint.config, checkpoint.format, stages[readers.number // ranks]).keys()
        assert set(read.of(checkpoint, read.for_tensors + read.for_digests)) <= own
        if ranks == 1:
            assert set(read.for_tensors.values()) == {1}
            assert not read.for_digests, "it was digested on the way"
    assert len(found) == len(every)
    assert made.fingerprint == fingerprint
