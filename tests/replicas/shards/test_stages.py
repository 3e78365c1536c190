"""Layers of a model, stage by stage: one after the other they compute what the whole does, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from awq_files import build_awq
from decoder_steps import Session, exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from in_stages import InStages
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, build_checkpoint

from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.errors import InvalidRequest
from motley.replicas.loading.cached_digests import CachedDigests
from motley.replicas.loading.digest_assignment import DigestReaders
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.sharding.stages import pipeline_stages

PROMPT = [7, 3, 200, 41, 41, 90, 5, 250, 17, 33, 101, 64, 8, 8, 190, 2, 77, 13, 255, 0]
FOUR = {"num_hidden_layers": 4}
FORMATS: dict[str, Callable[[Path], Path]] = {
    "tied": lambda folder: build_checkpoint(folder, tie_word_embeddings=True, **FOUR),
    "windows": lambda folder: build_checkpoint(folder, "mistral", sliding_window=7, **FOUR),
    "gptq": lambda folder: build_gptq(folder, **FOUR),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, sym=False, **FOUR),
    "gptq, head": lambda folder: build_gptq(folder, lm_head=True, **FOUR),
    "awq": lambda folder: build_awq(folder, **FOUR)[0],
    "fp8": lambda folder: build_fp8(folder, scales="rows", **FOUR)[0],
}


class Staged(InStages):
    """A model of a folder, as its stages load it."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        stages = pipeline_stages(inspect_checkpoint(folder).config.num_layers, sizes)
        self.loaded = [load_model(folder, exact_ops(), stage=stage) for stage in stages]
        super().__init__([each.decoder for each in self.loaded])


def check_same(folder: Path, sizes: Sequence[int]) -> None:
    whole = Session(load_model(folder, exact_ops()).decoder).greedy(PROMPT, 12)
    staged = Session(Staged(folder, sizes)).greedy(PROMPT, 12)  # type: ignore[arg-type]
    assert staged[0] == whole[0]
    assert torch.equal(staged[1], whole[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_whole_does(family: str, tmp_path: Path) -> None:
    check_same(build_checkpoint(tmp_path / "model", family, **FOUR), (1, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, tmp_path: Path) -> None:
    check_same(FORMATS[name](tmp_path / "model"), (1, 3))


@pytest.mark.parametrize("sizes", [(3, 1), (1, 2, 1), (1, 1, 1, 1), (4,)])
def test_however_many_and_however_unequal(sizes: Sequence[int], tmp_path: Path) -> None:
    check_same(build_checkpoint(tmp_path / "model", **FOUR), sizes)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the tensors of which anything was read."""
    names: set[str] = set()

    def noted(reads: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(self: WeightLoader, name: str, *part: slice, **how: bool) -> torch.Tensor:
            names.add(name)
            return reads(self, name, *part, **how)

        return noting

    for way in ("_read", "peek"):
        monkeypatch.setattr(WeightLoader, way, noted(getattr(WeightLoader, way)))
    return names


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_own_tensors_alone(tied: bool, tmp_path: Path, read: set[str]) -> None:
    """All are read by one of them; of a tied head's table, by the first and the last."""
    folder = build_checkpoint(tmp_path / "model", tie_word_embeddings=tied, **FOUR)
    by_stage = []
    for stage in pipeline_stages(4, (1, 2, 1)):
        read.clear()
        load_model(folder, exact_ops(), stage=stage)
        by_stage.append(set(read))
    assert set().union(*by_stage) == set(inspect_checkpoint(folder).tensors)
    for stage, names in zip(pipeline_stages(4, (1, 2, 1)), by_stage, strict=True):
        layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
        assert layers == set(range(*stage.layers))
    others = [{name for name in names if not name.startswith("model.layers.")} for names in by_stage]
    table = "model.embed_tokens.weight"
    assert others == [{table}, set(), {"model.norm.weight", table if tied else "lm_head.weight"}]


def test_what_stages_hold_adds_up(tmp_path: Path) -> None:
    """The part that a tied head shares with the embedding is held once more where it is not with that."""

    def held(folder: Path) -> tuple[int, int]:
        return load_model(folder, exact_ops()).weight_bytes, sum(each.weight_bytes for each in staged(folder))

    def staged(folder: Path) -> list[LoadedModel]:
        return Staged(folder, (1, 3)).loaded

    whole, parts = held(build_checkpoint(tmp_path / "apart", **FOUR))
    assert parts == whole
    tied = build_checkpoint(tmp_path / "tied", tie_word_embeddings=True, **FOUR)
    whole, parts = held(tied)
    assert parts == whole + load_model(tied, exact_ops()).decoder.head.held.given


def test_a_copy_of_a_tied_head_is_looked_at_where_the_head_is(tmp_path: Path) -> None:
    """And accounted for where it is not."""
    folder = tie_with_copy(tmp_path / "model")
    check_same(folder, (1, 3))


def tie_with_copy(folder: Path) -> Path:
    build_checkpoint(folder, tie_word_embeddings=True, **FOUR)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_stages_tell_the_fingerprint_of_the_whole(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", tie_word_embeddings=True, **FOUR)

    def divided() -> str:
        found: list[Sequence[bytes]] = []
        for stage in (*pipeline_stages(4, (1, 2, 1))[1:], pipeline_stages(4, (1, 2, 1))[0]):
            known = CachedDigests(readers=DigestReaders((1, 2, 1), 1, (0, 1, 2), stage.index))
            others = (lambda: found) if stage.is_first else None
            loaded = load_model(folder, exact_ops(), stage=stage, cached_digests=known, others=others)
            found.append(loaded.digests)
        assert all(found)
        return loaded.fingerprint

    before = divided()
    assert before == load_model(folder, exact_ops()).fingerprint
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert divided() != before


@pytest.mark.parametrize("sizes", [(1, 2), (4, 0), (5, -1), (2, 3)])
def test_layers_that_are_not_those_of_the_model_are_refused(sizes: Sequence[int]) -> None:
    with pytest.raises(InvalidRequest, match="4 layers of the model") as refused:
        pipeline_stages(4, sizes)
    assert refused.value.param == "pipeline_layers"


def test_a_later_stage_does_not_begin_with_tokens(tmp_path: Path) -> None:
    decoder: Decoder = Staged(build_checkpoint(tmp_path / "model", **FOUR), (1, 3)).decoders[1]
    assert not hasattr(decoder, "embedding")
    assert len(decoder.layers) == decoder.local.num_layers == 3
