"""Parts of a model, rank by rank: together they are the whole, and compute what it does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from awq_files import build_awq
from decoder_steps import Session, exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from thread_ranks import ThreadExchange, on_ranks
from tiny_checkpoints import FAMILIES, build_checkpoint

from motley.kernels.canonical_weights import GroupedWeight, Weight
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.errors import InvalidRequest
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.sharding.ranks import Ranks
from motley.replicas.model.sharding.split import TensorShard, shard_for_rank
from motley.replicas.quantization.weight_format import LinearSpec

PROMPT = [7, 3, 200, 41, 41, 90, 5, 250, 17, 33, 101, 64, 8, 8, 190, 2, 77, 13, 255, 0]
UNCONVERTED = ("self_attn.k_proj", "layers.1.mlp.down_proj")
FORMATS: dict[str, Callable[[Path], Path]] = {
    "gptq-int4": lambda folder: build_gptq(folder),
    "gptq-int4, one group": lambda folder: build_gptq(folder, group_size=-1),
    "gptq-int8": lambda folder: build_gptq(folder, bits=8, sym=False),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, sym=False),
    "gptq, desc_act, orders of their own": lambda folder: build_gptq(folder, desc_act=True, shared_order=False),
    "gptq, head": lambda folder: build_gptq(folder, lm_head=True),
    "gptq, biases": lambda folder: build_gptq(folder, "qwen2"),
    "awq": lambda folder: build_awq(folder)[0],
    "awq, some unconverted": lambda folder: build_awq(folder, unconverted=UNCONVERTED)[0],
    "fp8, rows": lambda folder: build_fp8(folder, scales="rows")[0],
    "fp8, all": lambda folder: build_fp8(folder, scales="all")[0],
}


def greedy(decoder: Decoder) -> tuple[list[int], torch.Tensor]:
    return Session(decoder).greedy(PROMPT, 12)


def check_same(folder: Path, size: int) -> None:
    """Greedy tokens to the last, logits as far as sums in another order go, and each rank the same to the bit."""
    tokens, logits = greedy(load_model(folder, exact_ops()).decoder)
    found = on_ranks(folder, size, exact_ops, greedy)
    for ranks_tokens, ranks_logits in found:
        assert ranks_tokens == tokens
        assert torch.equal(ranks_logits, found[0][1])
        # The depth of the sums, in units of fp32's last place of the largest value; measured: up to 12.
        assert (ranks_logits - logits).abs().max() < 64 * torch.finfo(torch.float32).eps * logits.abs().max()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_the_whole_does(family: str, size: int, tmp_path: Path) -> None:
    check_same(build_checkpoint(tmp_path / "model", family), size)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, tmp_path: Path) -> None:
    check_same(FORMATS[name](tmp_path / "model"), 2)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"vocab_size": 259}, {"intermediate_size": 99}])
def test_uneven_parts(options: dict[str, object], tmp_path: Path) -> None:
    check_same(build_checkpoint(tmp_path / "model", "qwen2", **options), 2)


def test_three_kv_heads_on_two_ranks(tmp_path: Path) -> None:
    """One rank has two of them, and their queries."""
    options = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    folder = build_checkpoint(tmp_path / "model", "llama", **options)
    kv_heads = on_ranks(folder, 2, exact_ops, lambda decoder: decoder.local.kv_shape[0])
    assert kv_heads == [1, 2]
    check_same(folder, 2)


def test_biases_of_sums_are_added_once(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    check_same(folder, 2)


def test_a_rank_that_adds_no_bias_leaves_none_over(tmp_path: Path) -> None:
    """A loader accounts for every tensor: those of o and down that another rank adds too."""
    folder = build_checkpoint(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    for rank in range(2):
        loaded = load_model(folder, exact_ops(), ranks=Ranks(parts_of(folder, 2), rank, ThreadExchange(rank, None, [])))  # type: ignore[arg-type]
        [down] = loaded.decoder.layers[0].mlp.down.parts
        assert (down.held.weights == 64 * 48 * 4 + 64 * 4) is (rank == 0)


def test_two_sums_a_layer(tmp_path: Path) -> None:
    """One more for the embedding, and one exchange for the head."""

    def count(decoder: Decoder) -> tuple[int, int]:
        Session(decoder).feed(PROMPT)
        assert decoder.ranks is not None
        exchange = decoder.ranks.exchange
        assert isinstance(exchange, ThreadExchange)
        return exchange.sums, exchange.gathers

    folder = build_checkpoint(tmp_path / "model", "qwen3")
    layers = inspect_checkpoint(folder).config.num_layers
    assert on_ranks(folder, 2, exact_ops, count) == [(2 * layers + 1, 1)] * 2


def parts_of(folder: Path, size: int) -> list[TensorShard]:
    checkpoint = inspect_checkpoint(folder)
    return [shard_for_rank(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)]


def weights_of(folder: Path, part: TensorShard | None = None) -> list[Weight]:
    checkpoint = inspect_checkpoint(folder)
    weights = WeightLoader(checkpoint.tensors, torch.device("cpu"))
    plan = (checkpoint if part is None else part).config.layers[0]
    return [checkpoint.format.linear(weights, linear, torch.float32) for linear in plan.specs]


@pytest.mark.parametrize("name", [name for name in FORMATS if "desc_act" not in name])
def test_parts_are_the_whole_to_the_bit(name: str, tmp_path: Path) -> None:
    folder = FORMATS[name](tmp_path / "model")
    whole = weights_of(folder)
    parts = [weights_of(folder, part) for part in parts_of(folder, 2)]
    for index, weight in enumerate(whole):
        by_rank = [dense(part[index]) for part in parts]
        assert torch.equal(torch.cat(by_rank, dim=1 if index in (3, 6) else 0), dense(weight))


def dense(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if hasattr(weight, "dequantize") else weight.weight


def test_a_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads half of the bytes of linears divided in two, in whichever format."""
    read: list[int] = []
    whole_or_part = WeightLoader._read

    def counting(self: WeightLoader, name: str, *part: slice, retained: bool) -> torch.Tensor:
        tensor = whole_or_part(self, name, *part, retained=retained)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(WeightLoader, "_read", counting)
    for name in ("gptq-int4", "awq", "fp8, rows"):
        folder = FORMATS[name](tmp_path / name)
        read.clear()
        weights_of(folder)
        whole = sum(read)
        read.clear()
        weights_of(folder, parts_of(folder, 2)[1])
        assert sum(read) < 0.56 * whole  # row scales of o and down, and order tables, are every rank's


def test_scattered_columns_name_features_of_the_whole_input(tmp_path: Path) -> None:
    folder = build_gptq(tmp_path / "model", desc_act=True)
    whole = weights_of(folder)[6]
    assert isinstance(whole, GroupedWeight)
    assert whole.permutation is not None
    orders = []
    for part in parts_of(folder, 2):
        down = weights_of(folder, part)[6]
        assert isinstance(down, GroupedWeight)
        assert down.permutation is not None
        orders.append(down.permutation)
    assert torch.equal(torch.cat(orders), whole.permutation)


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({}, 3, "3 ranks cannot share 2 KV heads and 4 heads"),
        ({"num_key_value_heads": 4}, 8, "8 ranks cannot share 4 KV heads and 4 heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    options: dict[str, object], size: int, said: str, tmp_path: Path
) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", **options)
    with pytest.raises(InvalidRequest, match=said) as caught:
        parts_of(folder, size)
    assert caught.value.param == "tensor_parallel"


def test_groups_are_not_cut(tmp_path: Path) -> None:
    """Heads of 32 features whose two lie in one group of 128."""
    folder = build_gptq(tmp_path / "model", group_size=128)
    with pytest.raises(InvalidRequest, match=r"inputs 0 to 64 of model\.layers\.0\.self_attn\.o_proj are not whole"):
        parts_of(folder, 2)
    few = build_gptq(tmp_path / "few", group_size=128, intermediate_size=128)
    with pytest.raises(InvalidRequest, match=r"128 features of model\.layers\.0\.mlp\.down_proj are 1 whole groups"):
        parts_of(few, 2)


def test_blocks_of_fp8_are_not_cut(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    check_same(build_fp8(tmp_path / "model", **wide)[0], 2)
    with pytest.raises(InvalidRequest, match=r"q_proj are not whole groups of 128"):
        parts_of(build_fp8(tmp_path / "narrow")[0], 2)


def test_every_rank_has_a_part_of_everything(tmp_path: Path) -> None:
    """Without gaps and without overlaps; KV heads that there are too few of are had by several."""
    folder = build_checkpoint(tmp_path / "model", "llama", num_attention_heads=8, num_key_value_heads=2)
    parts = parts_of(folder, 4)
    [plans] = zip(*(part.config.layers[:1] for part in parts), strict=True)
    heads, inner = [plan.attention.heads.own for plan in plans], [plan.mlp.inner.own for plan in plans]
    for spans in (heads, inner, [part.tokens for part in parts]):
        assert spans[0][0] == 0
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        assert all(last > first for first, last in spans)
    assert [plan.attention.kv_heads.own for plan in plans] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_rows_of_a_part_in_units() -> None:
    spec = LinearSpec("x", 256, 512, bias=True, rows=(128, 256), columns=(256, 512))
    assert (spec.outputs(8), spec.inputs(128)) == (slice(16, 32), slice(2, 4))
    assert not spec.adds_bias
