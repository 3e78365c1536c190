"""A second start knows how fast it is by the first one's measurements, where these still hold and nowhere else."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner
from tiny_checkpoints import build_checkpoint

from motley.replicas.checkpoint.cache.weights_cache import open_weights_cache
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup import cached_rates, engine_rates
from motley.replicas.engine.startup.cached_rates import FASTER, SLOWER, CachedRates
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine.startup.engine_rates import EngineRates
from motley.replicas.engine_config import EngineConfig
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import PROFILED_BATCH_SIZES, ReplicaProfile


class Clocked(FakeRunner):
    """Every step takes so long, by a clock of its own."""

    def __init__(self, step_s: float) -> None:
        super().__init__(400, 100)
        self.step_s, self.now, self.steps = step_s, 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        self.now += self.step_s
        self.steps += 1
        return super().run(plan)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[EngineCore, Clocked]]:
    def made(step_s: float) -> tuple[EngineCore, Clocked]:
        runner = Clocked(step_s)
        monkeypatch.setattr(engine_rates, "time", runner)
        scheduler = Scheduler(BlockPool(400), max_batch_tokens=256, max_running=16)
        return EngineCore(runner, scheduler, ModelLimits(100, 1024, ()), None), runner

    return made


Engines = Callable[[float], tuple[EngineCore, Clocked]]


def _found(kept: CachedRates, core: EngineCore) -> tuple[EngineRates, str]:
    found = kept.of(core)
    assert not core.busy
    core.scheduler.pool.forget_prefixes()
    core.scheduler.pool.check(idle=True)
    return found


@pytest.mark.parametrize("slower", [1.0, 0.9 * SLOWER, 1.1 / FASTER])
def test_a_start_takes_what_an_earlier_one_has_measured(slower: float, tmp_path: Path, engine: Engines) -> None:
    core, first = engine(0.001)
    measured, why = _found(CachedRates(tmp_path, "key"), core)
    assert (why, measured.decode_s[0]) == ("measured", pytest.approx(0.001))
    core, second = engine(0.001 * slower)
    again, why = _found(CachedRates(tmp_path, "key"), core)
    assert again == measured
    assert why.startswith("as an earlier start measured them: a step of one sequence took 1 ms then and ")
    assert 0 < second.steps < first.steps / 10, "it computes a little all the same: readiness means speed"


@pytest.mark.parametrize("slower", [1.1 * SLOWER, 0.9 / FASTER])
def test_what_takes_another_time_now_is_measured_anew_and_kept(slower: float, tmp_path: Path, engine: Engines) -> None:
    _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    found, why = _found(CachedRates(tmp_path, "key"), engine(0.001 * slower)[0])
    assert why.startswith("measured anew: ")
    assert found.decode_s[0] == pytest.approx(0.001 * slower)
    assert _found(CachedRates(tmp_path, "key"), engine(0.001 * slower)[0])[0] == found


def test_another_engine_finds_none(tmp_path: Path, engine: Engines) -> None:
    _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    assert _found(CachedRates(tmp_path, "another"), engine(0.001)[0])[1] == "measured"


WRONG = {
    "no JSON": b"{",
    "of another kind": b"[]",
    "nested": b"[" * 50_000,
    "beyond any double": b'{"prefill_tokens_per_s": 1' + b"0" * 400 + b', "context_s": 0, "decode_s": [1]}',
    "lacks one": b'{"prefill_tokens_per_s": 1.0, "context_s": 0.0}',
    "too few": b'{"prefill_tokens_per_s": 1.0, "context_s": 0.0, "decode_s": [0.001]}',
    "no number": json.dumps({"prefill_tokens_per_s": 1.0, "context_s": 0.0, "decode_s": [None] * 10}).encode(),
    "not finite": json.dumps({"prefill_tokens_per_s": 1e999, "context_s": 0.0, "decode_s": [0.001] * 10}).encode(),
    "nothing at all": json.dumps({"prefill_tokens_per_s": 0.0, "context_s": 0.0, "decode_s": [0.001] * 10}).encode(),
    "backwards": json.dumps(
        {"prefill_tokens_per_s": 1.0, "context_s": 0.0, "decode_s": [0.001 / (1 + n) for n in range(10)]}
    ).encode(),
    "negative": json.dumps({"prefill_tokens_per_s": 1.0, "context_s": -1.0, "decode_s": [0.001] * 10}).encode(),
}


@pytest.mark.parametrize("said", WRONG.values(), ids=list(WRONG))
def test_what_is_damaged_is_told_and_replaced(
    said: bytes, tmp_path: Path, engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(PROFILED_BATCH_SIZES) == 10
    _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    [path] = tmp_path.iterdir()
    path.write_bytes(said)
    with caplog.at_level(logging.WARNING):
        found, why = _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    assert why == "measured"
    assert "the rates that an earlier start measured are not used" in caplog.text
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[0] == found


def test_what_others_may_write_to_is_not_believed(
    tmp_path: Path, engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] == "measured"
    assert "others may write to it" in caplog.text
    [path] = tmp_path.iterdir()
    path.rename(elsewhere := tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] == "measured"
    path.unlink()
    path.mkdir()
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] == "measured"
    assert "Is a directory" in caplog.text


def test_a_measurement_does_not_stay_for_good(tmp_path: Path, engine: Engines) -> None:
    """It may have been taken in a bad moment."""
    _found(CachedRates(tmp_path, "key"), engine(0.001)[0])
    [path] = tmp_path.iterdir()
    fresh, stale = (path.stat().st_mtime - share * cached_rates.EXPIRES_S for share in (0.9, 1.1))
    os.utime(path, (fresh, fresh))
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] != "measured"
    os.utime(path, (stale, stale))
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] == "measured"
    assert _found(CachedRates(tmp_path, "key"), engine(0.001)[0])[1] != "measured"


def test_what_others_remove_meanwhile_is_no_failure(
    tmp_path: Path, engine: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone.part").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(cached_rates, "MAX_FILES", 1)
    with caplog.at_level(logging.WARNING):
        _found(CachedRates(tmp_path, "a"), engine(0.001)[0])
        _found(CachedRates(tmp_path, "b"), engine(0.001)[0])
    assert caplog.text == ""
    assert _found(CachedRates(tmp_path, "b"), engine(0.001)[0])[1] != "measured"


def test_a_folder_that_cannot_be_written_to_is_a_word_in_the_log(
    tmp_path: Path, engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert _found(CachedRates(tmp_path / "file", "key"), engine(0.001)[0])[1] == "measured"
    assert "the measured rates are not kept" in caplog.text


def test_those_that_were_measured_longest_ago_go(
    tmp_path: Path, engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_rates, "MAX_FILES", 2)
    abandoned = tmp_path / "other.part"
    abandoned.write_text("")
    os.utime(abandoned, (0, 0))
    for age, key in ((300, "a"), (200, "b"), (100, "c")):
        before = set(tmp_path.iterdir())
        _found(CachedRates(tmp_path, key), engine(0.001)[0])
        for path in set(tmp_path.iterdir()) - before:
            then = path.stat().st_mtime - age
            os.utime(path, (then, then))
    assert len(list(tmp_path.iterdir())) == 2
    assert _found(CachedRates(tmp_path, "b"), engine(0.001)[0])[1] != "measured"
    assert _found(CachedRates(tmp_path, "a"), engine(0.001)[0])[1] == "measured"


def _agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a step is, is the machine's business."""
    monkeypatch.setattr(cached_rates, "FASTER", 1e9)
    monkeypatch.setattr(cached_rates, "SLOWER", 1e9)


def _config(tmp_path: Path, **settings: object) -> EngineConfig:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    given = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 2**20, "weights_cache": str(cache)}
    return EngineConfig(**given | settings)  # type: ignore[arg-type]


def _warm(checkpoint: Path, config: EngineConfig) -> BuiltEngine:
    built = build_engine(checkpoint, config)
    try:
        built.warm_up()
    finally:
        built.close()
    return built


def test_a_replica_starts_with_the_rates_of_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _agree(monkeypatch)
    checkpoint = build_checkpoint(tmp_path / "model", "qwen2")
    first = _warm(checkpoint, _config(tmp_path))
    assert first.profile.choices["rates"] == "measured"
    second = _warm(checkpoint, _config(tmp_path))
    assert second.profile.choices["rates"].startswith("as an earlier start measured them")
    assert second.profile.decode_s == first.profile.decode_s
    assert second.profile.prefill_tokens_per_s == first.profile.prefill_tokens_per_s
    second.core.scheduler.pool.check(idle=True)
    assert "rates" not in _warm(checkpoint, _config(tmp_path, weights_cache="off")).profile.choices


def test_another_engine_has_rates_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = build_checkpoint(tmp_path / "model", "qwen2")
    config, cache = _config(tmp_path), open_weights_cache(str(tmp_path / "cache"))
    built = build_engine(checkpoint, config)
    here: Any = SimpleNamespace(device=torch.device("cpu"), choices={"layer": "by this kernel"})
    built_profile = built.profile
    built.close()

    def path(config: EngineConfig = config, profile: ReplicaProfile = built_profile, ops: Any = here) -> Path:
        found = cached_rates.cached_rates(cache, config, ops, profile, None)
        assert found is not None
        return found._path

    gpu: Any = SimpleNamespace(device=torch.device("cuda"), choices={})
    own = path()
    assert path() == own
    assert path(config=_config(tmp_path, max_batch_tokens=256)) != own
    assert path(config=_config(tmp_path, speculate_ngram=3)) != own
    assert path(profile=replace(built_profile, fingerprint="another")) != own
    assert path(ops=SimpleNamespace(device=here.device, choices={"layer": "by another"})) != own
    for name, other in (("cpu_name", "another"), ("usable_cores", 77), ("_source_digest", "another")):
        with monkeypatch.context() as patch:
            patch.setattr(cached_rates, name, lambda other=other: other)
            assert path() != own, name
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "another")
        assert path() != own
    torch.set_num_threads(2)  # each test begins with one
    assert path() != own
    assert path(config=_config(tmp_path, weights_cache="off")) != own, "its config is another one"
    assert cached_rates.cached_rates(None, config, here, built_profile, None) is None
    assert cached_rates.cached_rates(cache, config, gpu, built_profile, None) is None
    tiered = _config(tmp_path, weights_memory_bytes=2**20)
    assert cached_rates.cached_rates(cache, tiered, here, built_profile, None) is None


@pytest.mark.slow("A model divided among two ranks is started three times")
def test_ranks_of_one_machine_keep_theirs_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _agree(monkeypatch)
    checkpoint = build_checkpoint(tmp_path / "model", "qwen2")
    config = _config(tmp_path, tensor_parallel=2, threads=2)
    assert _warm(checkpoint, config).profile.choices["rates"] == "measured"
    assert _warm(checkpoint, config).profile.choices["rates"].startswith("as an earlier start")
    monkeypatch.setattr(
        "motley.replicas.parallel.leader.follower_group.FollowerGroup.shares_memory", property(lambda group: False)
    )
    built = build_engine(checkpoint, config)
    built.close()
    assert built.rates is None
