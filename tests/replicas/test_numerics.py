"""numerics="exact": nothing that happens around a sequence changes its tokens, or even its log-probabilities."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from loud_checkpoints import loudness, plant
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine, RequestOutput
from motley.replicas.types import SamplingParams

OUTLIER = 7  # a loud token: see loud_checkpoints
FACTOR = 40.0  # of its one channel in the norms
TIMES = 10.0  # how much larger a linear's largest input must be for a neighbour to count as loud
PROMPTS = [[11 + (i * step) % 200 for i in range(length)] for step, length in ((3, 50), (3, 37), (5, 70), (1, 9))]
LOUD = [12, OUTLIER, 13, OUTLIER] * 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)

CASES = {
    "fp32": ("tiny", "float32", {}),
    "bf16": ("tiny", "bfloat16", {}),
    "int4-bf16": ("demo", "bfloat16", {}),
    "int4-fp32": ("demo", "float32", {}),
    "int4-bf16-kv-int8": ("demo", "bfloat16", {"kv_dtype": "int8"}),
    "int4-as-int8": ("demo", "bfloat16", {"cpu_weights": "int8"}),
    "int4-as-int4": ("demo", "bfloat16", {"cpu_weights": "int4"}),
}
RARE = ("fp32", "int4-fp32", "int4-as-int4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = build_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", sliding_window=None)
    demo = Path(shutil.copytree(demo_path(), tmp_path_factory.mktemp("demo") / "model"))
    for folder in (tiny, demo):
        plant(folder, OUTLIER, FACTOR)
    plain = Path(shutil.copytree(demo_path(), tmp_path_factory.mktemp("plain") / "model"))
    plant(plain, OUTLIER, 1.0)
    return {"tiny": tiny, "demo": demo, "plain": plain}


@pytest.fixture(scope="module", params=[name for name in CASES if name not in RARE] + thorough(*RARE))
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Path, dict]:
    folder, dtype, settings = CASES[request.param]
    return folders[folder], {"dtype": dtype, "numerics": "exact", "threads": 2, "max_model_len": 256} | settings


@pytest.fixture(scope="module")
def alone(case: tuple[Path, dict]) -> list[RequestOutput]:
    """Every prompt by itself, in one chunk, with nothing to reuse."""
    engine = make(case, reuse_prefixes=False)
    return [engine.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def make(case: tuple[Path, dict], **settings: object) -> Engine:
    folder, base = case
    return Engine(folder, **(base | settings))


def assert_same(got: RequestOutput, expected: RequestOutput, skip: int = 0) -> None:
    assert got.token_ids == expected.token_ids[skip:]
    assert got.logprobs == expected.logprobs[skip:]  # bit by bit


def test_batch_neighbours_even_loud_ones(case: tuple[Path, dict], alone: list[RequestOutput]) -> None:
    outputs = make(case).generate([LOUD, *PROMPTS, LOUD], GREEDY)
    for got, expected in zip(outputs[1:-1], alone, strict=True):
        assert_same(got, expected)


def test_the_loud_neighbour_is_loud_at_every_linear(case: tuple[Path, dict], report: Callable[[str], None]) -> None:
    """Else the test above shows nothing."""
    times = loudness(make(case), LOUD, PROMPTS)
    report(f"the loud neighbour's largest inputs: {', '.join(f'{kind} {by:.0f}x' for kind, by in times.items())}")
    assert min(times.values()) > TIMES, times


def test_without_the_factor_nothing_is_loud(folders: dict[str, Path]) -> None:
    times = loudness(Engine(folders["plain"], max_model_len=256), LOUD, PROMPTS)
    assert max(times.values()) < TIMES / 2, times


@pytest.mark.slow("Three engines, each with chunks of another size, answer four prompts")
def test_chunked_prefill(case: tuple[Path, dict], alone: list[RequestOutput]) -> None:
    for budget in (5, 16, 33):
        outputs = make(case, max_batch_tokens=budget, max_running=4).generate(PROMPTS, GREEDY)
        for got, expected in zip(outputs, alone, strict=True):
            assert_same(got, expected)


def test_prefix_hit(case: tuple[Path, dict], alone: list[RequestOutput]) -> None:
    engine = make(case)
    engine.generate(PROMPTS, GREEDY)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert outputs[0].cached_tokens == 48
    for got, expected in zip(outputs, alone, strict=True):
        assert_same(got, expected)


def test_preemption(case: tuple[Path, dict], alone: list[RequestOutput]) -> None:
    folder, base = case
    probe = make(case, max_model_len=112)
    block_bytes = kv_bytes(probe) // probe._built.profile.kv_blocks_total
    engine = Engine(folder, **(base | {"kv_memory_bytes": 8 * block_bytes, "max_model_len": 112}))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert engine._built.core.scheduler.num_preemptions > 0
    for got, expected in zip(outputs, alone, strict=True):
        assert_same(got, expected)


def kv_bytes(engine: Engine) -> int:
    return sum(tensor.nbytes for tensor in engine._built.runner.kv)


def test_resume(case: tuple[Path, dict], alone: list[RequestOutput]) -> None:
    engine = make(case, reuse_prefixes=False)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        for k in (1, 7, 23):
            got = engine.generate(prompt, GREEDY, output_ids=[expected.token_ids[:k]])[0]
            assert_same(got, expected, skip=k)
