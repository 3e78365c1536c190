"""Embeddings: transformers' own hidden states, pooled, whatever the engine does around them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import build_model, save_model

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import Pooling, Request, SamplingParams

PROMPTS = [[(7 + i * step) % 250 for i in range(length)] for step, length in ((3, 50), (5, 81), (11, 1), (3, 37))]
SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 128}


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return build_model("qwen2")


@pytest.fixture(scope="module")
def folder(reference: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(reference, tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module", params=list(Pooling))
def pooling(request: pytest.FixtureRequest) -> Pooling:
    return request.param


@pytest.fixture(scope="module")
def expected(reference: torch.nn.Module, pooling: Pooling) -> torch.Tensor:
    with torch.no_grad():
        states = [reference.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return torch.stack([rows.mean(0) if pooling is Pooling.MEAN else rows[-1] for rows in states])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_as_transformers_pools(folder: Path, pooling: Pooling, expected: torch.Tensor) -> None:
    engine = Engine(folder, **SETTINGS)
    close(engine.embed(PROMPTS, pooling=pooling, normalize=False), expected)
    unit = engine.embed(PROMPTS, pooling=pooling)
    close(unit, torch.nn.functional.normalize(expected, dim=1))


@pytest.mark.parametrize("budget", [4, 16, 33])
def test_in_chunks(folder: Path, pooling: Pooling, expected: torch.Tensor, budget: int) -> None:
    engine = Engine(folder, **SETTINGS, max_batch_tokens=budget, max_running=4)
    close(engine.embed(PROMPTS, pooling=pooling, normalize=False), expected)


def test_after_a_prefix_hit(folder: Path, pooling: Pooling, expected: torch.Tensor) -> None:
    engine = Engine(folder, **SETTINGS)
    engine.generate(PROMPTS, SamplingParams(max_tokens=1, ignore_eos=True))
    close(engine.embed(PROMPTS, pooling=pooling, normalize=False), expected)


def test_among_sequences_that_generate(folder: Path, pooling: Pooling, expected: torch.Tensor) -> None:
    """One of them soon needs a block that only a pooled sequence can give up."""
    probe = Engine(folder, **SETTINGS)
    block = sum(tensor.nbytes for tensor in probe._built.runner.kv) // probe._built.profile.kv_blocks_total
    engine = Engine(folder, **SETTINGS | {"kv_memory_bytes": 9 * block}, max_batch_tokens=16, max_running=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)
    core = engine._built.core
    text = PROMPTS[0][:47]  # three blocks with one place left; the longest prompt takes the other six
    alone = probe.generate(text, greedy)[0].token_ids
    core.add(0, Request("text", tuple(text), greedy, priority=2))
    for key, prompt in enumerate(PROMPTS, start=1):
        longest = prompt is PROMPTS[1]
        core.add(key, Request(str(key), tuple(prompt), SamplingParams(seed=0), priority=int(longest), pooling=pooling))
    vectors: dict[int, tuple[float, ...]] = {}
    tokens: list[int] = []
    while core.busy:
        for emission in core.step():
            tokens += [token for delta in emission.message.deltas for token in delta.token_ids]
            if emission.message.embedding is not None:
                assert emission.done
                assert emission.key not in vectors
                vectors[emission.key] = emission.message.embedding
    assert tokens == alone
    close(torch.tensor([vectors[key] for key in sorted(vectors)]), expected)
    load = core.scheduler.load()
    assert load.kv_blocks_free == load.kv_blocks_total
    assert core.scheduler.num_preemptions > 0


def test_a_prompt_may_fill_the_context_but_not_more(folder: Path) -> None:
    engine = Engine(folder, **SETTINGS)
    assert engine.embed([[1] * 128]).shape == (1, 64)
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.embed([[1] * 129])


def test_the_two_poolings_differ(folder: Path) -> None:
    engine = Engine(folder, **SETTINGS)
    last, mean = (engine.embed(PROMPTS[:1], pooling=each) for each in ("last", "mean"))
    assert (last - mean).abs().max() > 1e-2


def test_unknown_pooling_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Engine(folder, **SETTINGS).embed([[1]], pooling="max")
    assert refusal.value.param == "pooling"
