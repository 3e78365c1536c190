"""Which process of a divided model digests what: every piece by one, which reads it anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from fp8_files import build_fp8
from gptq_files import build_gptq
from steps import exact_ops
from thread_ranks import ThreadExchange
from tiny_checkpoints import build_checkpoint

from motley.replicas import contents, reading
from motley.replicas.checkpoint import Checkpoint, inspect_checkpoint
from motley.replicas.contents import Piece, pieces_of
from motley.replicas.known import Known, names_of
from motley.replicas.layout import decoder_layout
from motley.replicas.model import LoadedModel, load_model
from motley.replicas.quantization.base import Span
from motley.replicas.shards.ranks import Ranks
from motley.replicas.shards.readers import Readers, owners, reads
from motley.replicas.shards.split import split
from motley.replicas.shards.stages import stages_of
from motley.replicas.weights import Weights, rows_of

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
    monkeypatch.setattr(contents, "PIECE_BYTES", 1 << 10)


def all_readers(layers: tuple[int, ...], ranks: int) -> list[Readers]:
    everyone = tuple(range(len(layers) * ranks))
    return [Readers(layers, ranks, everyone, number) for number in everyone]


def by_owner(checkpoint: Checkpoint, readers: Readers) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in readers.processes]
    pieces = pieces_of(checkpoint.tensors, names_of(checkpoint))
    for piece, owner in zip(pieces, owners(checkpoint, names_of(checkpoint), readers), strict=True):
        found[owner].append(piece)
    return found


def loaded(folder: Path, readers: Readers, found: list[Sequence[bytes]] | None = None) -> LoadedModel:
    """A process's part. found: by the others; None: it does not tell the fingerprint."""
    checkpoint = inspect_checkpoint(folder)
    stage, rank = divmod(readers.number, readers.ranks)
    parts = [split(checkpoint.config, checkpoint.format, each, readers.ranks) for each in range(readers.ranks)]
    ranks = Ranks(parts, rank, ThreadExchange(rank, None, [])) if readers.ranks > 1 else None  # type: ignore[arg-type]
    others = None if found is None else (lambda: found)
    known = Known(readers=readers)
    return load_model(
        folder, exact_ops(), ranks=ranks, stage=stages_of(LAYERS, readers.layers)[stage], known=known, others=others
    )


@pytest.mark.parametrize("tied", [False, True])
def test_stages_digest_what_they_have(tied: bool, tmp_path: Path) -> None:
    """All of it, and of a tied table, which two have, the first or the last each piece."""
    folder = build_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    checkpoint = inspect_checkpoint(folder)
    found = by_owner(checkpoint, all_readers((1, 2), 1)[0])
    for stage, pieces in zip(stages_of(LAYERS, (1, 2)), found, strict=True):
        own = decoder_layout(checkpoint.config, checkpoint.format, stage).keys() & checkpoint.tensors.keys()
        assert (TABLE in own) == (stage.is_first or tied)
        assert {piece.name for piece in pieces} - {TABLE} == own - {TABLE}
    every = Counter(pieces_of(checkpoint.tensors, names_of(checkpoint)))
    assert Counter(piece for pieces in found for piece in pieces) == every
    assert TABLE in {piece.name for piece in found[0]}
    assert tied or TABLE not in {piece.name for piece in found[1]}


def test_ranks_digest_their_rows_and_of_columns_as_much_as_the_others(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(FORMATS["qwen2"](tmp_path / "model"))
    found = by_owner(checkpoint, all_readers((LAYERS,), 2)[0])
    nbytes = [sum(piece.end - piece.begin for piece in pieces) for pieces in found]
    assert abs(nbytes[0] - nbytes[1]) <= contents.PIECE_BYTES
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
    monkeypatch.setattr(contents, "PIECE_BYTES", 5 * info.nbytes // 8)
    first, second = by_owner(checkpoint, all_readers((LAYERS,), 2)[0])
    of = [[piece.begin - info.begin for piece in pieces if piece.name == TABLE] for pieces in (first, second)]
    assert of == [[0], [5 * info.nbytes // 8]]


def test_what_no_process_of_a_host_reads_they_divide(tmp_path: Path) -> None:
    """As it has to say whether its files are those of the others."""
    checkpoint = inspect_checkpoint(FORMATS["qwen2"](tmp_path / "model"))
    layers = (1, 1, 1)
    found = by_owner(checkpoint, Readers(layers, 1, (1, 2), 1))
    every = [*pieces_of(checkpoint.tensors, names_of(checkpoint))]
    assert Counter(piece for pieces in found for piece in pieces) == Counter(every)
    nbytes = [sum(piece.end - piece.begin for piece in pieces) for pieces in found]
    assert abs(nbytes[0] - nbytes[1]) <= contents.PIECE_BYTES
    names = [{piece.name for piece in pieces} for pieces in found]
    assert TABLE in names[0]
    for stage in (1, 2):
        name = f"model.layers.{stage}.mlp.down_proj.weight"
        assert [name in each for each in names] == [stage == 1, stage == 2]
    [everything] = by_owner(checkpoint, Readers(layers, 1, (2,), 2))
    assert everything == every


@pytest.mark.parametrize(("layers", "ranks"), DIVISIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_known_before_what_each_process_reads(
    name: str, layers: tuple[int, ...], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every format, of layers and head."""
    folder = FORMATS[name](tmp_path / "model")
    checkpoint = inspect_checkpoint(folder)
    taken: dict[str, Span] = {}
    whole = Weights._read

    def noted(weights: Weights, name: str, *part: slice, kept: bool) -> torch.Tensor:
        info = checkpoint.tensors[name][1]
        rows, row_bytes = rows_of(info.shape, part), info.nbytes // info.shape[0]
        taken[name] = (0, info.nbytes) if rows is None else (rows[0] * row_bytes, rows[1] * row_bytes)
        return whole(weights, name, *part, kept=kept)

    monkeypatch.setattr(Weights, "_read", noted)
    every = all_readers(layers, ranks)
    for readers, expected in zip(every, reads(checkpoint, every[0]), strict=True):
        taken.clear()
        loaded(folder, readers)
        assert taken == expected


class Reads:
    """Bytes that this process has read, by tensor, and for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.for_tensors: Counter[tuple[str, int]] = Counter()
        self.for_digests: Counter[tuple[str, int]] = Counter()
        for module, into in ((reading, self.for_tensors), (contents, self.for_digests)):
            monkeypatch.setattr(module, "read_piece", self._noting(into, contents.read_piece))

    @staticmethod
    def _noting(found: Counter[tuple[str, int]], whole: Callable[..., None]) -> Callable[..., None]:
        def noted(piece: Piece, at: int, into: memoryview, *file: Any) -> None:
            found.update((piece.path.name, byte) for byte in range(piece.begin, piece.end))
            whole(piece, at, into, *file)

        return noted

    def of(self, checkpoint: Checkpoint, found: Mapping[tuple[str, int], int]) -> Iterator[str]:
        """Tensors that have such bytes."""
        for name, (path, info) in checkpoint.tensors.items():
            if any((path.name, byte) in found for byte in range(info.begin, info.end)):
                yield name


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
    stages = stages_of(LAYERS, layers)
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
