"""New weights for a model that is divided among GPUs: all ranks and stages take them while they serve, or none does.

Real processes, of which each has the stand-in for a GPU, or none, and gloo in NCCL's place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_driver import drive
from gptq_files import build_gptq
from late_device import LateDevice
from late_exchange import LateExchange
from late_shards import MIXED, RANKS, STAGES, built, followers
from new_weights import changed, of_another, tensors_of, written
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.startup import engine_builder
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine.startup.engine_rates import EngineRates
from motley.replicas.errors import CheckpointError, EngineLost, MotleyError, Unavailable
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.parallel.follower.gpu_follower import _GpuRank
from motley.replicas.parallel.leader import follower_group
from motley.replicas.types import PROFILED_BATCH_SIZES, Request, SamplingParams, StreamMessage
from motley.replicas.updates.live_weights import PreparedVersion
from motley.replicas.updates.weight_file import WeightFile

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ranks": ("serves", RANKS),
    "stages": ("serves", STAGES),
    "stages of ranks": ("serves", RANKS | STAGES),
    **MIXED,
}
LAYERS = {"num_hidden_layers": 4}
FORMATS: dict[str, Callable[[Path, int], Path]] = {
    "dense": lambda folder, seed: build_checkpoint(folder, "qwen2", seed=seed, tie_word_embeddings=True, **LAYERS),
    "gptq": lambda folder, seed: build_gptq(folder, seed=seed, desc_act=True, **LAYERS),
}
PROMPT = tuple(range(3, 40))
NEW = ("embed_tokens", "layers.0.", "layers.3.")  # of every process a part


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(follower_group, "CollectiveExchange", LateExchange)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    yield
    assert followers() == []


def request(tokens: int = 16, **given: Any) -> Request:
    params = {"max_tokens": tokens, "temperature": 0.0, "seed": 7, "ignore_eos": True, **given}
    return Request("r", PROMPT, SamplingParams(**params))


ASKED = [request(), request(logprobs=2, temperature=0.8), request(repetition_penalty=1.2), request(logprobs=1)]


def said(messages: list[StreamMessage]) -> list[Any]:
    """To the bit."""
    deltas = [delta for message in messages for delta in message.deltas]
    return [(token, delta.logprobs) for delta in deltas for token in delta.token_ids]


def every(made: BuiltEngine) -> list[Any]:
    return [said(each) for each in drive(made.core, ASKED, apart=4)]


def folders(base: Path, name: str) -> tuple[Path, WeightFile, Path]:
    """A checkpoint, a file of new values, and the checkpoint with them."""
    one, two = (FORMATS[name](base / part, seed) for seed, part in enumerate(("one", "two")))
    new = of_another(one, two, lambda name: any(part in name for part in NEW))
    return one, WeightFile(written(base / "new.safetensors", new)), changed(one, new, base / "changed")


_fresh: dict[tuple[str, str], tuple[list[Any], str]] = {}


def fresh(folder: Path, name: str, way: str) -> tuple[list[Any], str]:
    """Return the output of an engine of the changed checkpoint, and its fingerprint; the checkpoints of one name are
    alike.
    """
    if (name, way) not in _fresh:
        what, given = WAYS[way]
        made = built(folder, what, **given)
        try:
            _fresh[name, way] = every(made), made.profile.fingerprint
        finally:
            made.close()
    return _fresh[name, way]


def over(made: BuiltEngine, file: WeightFile, asked: Request) -> list[StreamMessage]:
    """A request that runs over an update, which a thread of its own prepares, as a replica does."""
    assert made.weights is not None
    weights, prepared = made.weights, list[PreparedVersion]()
    thread = threading.Thread(target=lambda: prepared.append(weights.prepare(file)))
    found: list[StreamMessage] = []

    def step() -> None:
        found.extend(emission.message for emission in made.core.step())

    made.core.add(0, asked)
    while not found:
        step()
    thread.start()
    while thread.is_alive() and made.core.busy:
        step()
    thread.join()
    made.adopt(prepared[0])
    while made.core.busy:
        step()
    return found


@pytest.mark.slow("Two divided engines answer four requests, one of them three times")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("dense", "CPU, GPU, CPU"),
        ("gptq", "ranks"),
        *thorough(
            *(("dense", way) for way in WAYS if way != "CPU, GPU, CPU"),
            ("gptq", "GPU, CPU"),
        ),
    ],
)
def test_what_has_begun_ends_on_the_weights_that_it_began_with(name: str, way: str, tmp_path: Path) -> None:
    """Tokens and log-probabilities are those of engines of either checkpoint, to the bit; steps of both versions, and
    graphs where there are any, follow each other. Nothing of the old is left in any process: see late_follower.py.
    """
    what, given = WAYS[way]
    folder, file, after = folders(tmp_path, name)
    new, fingerprint = fresh(after, name, way)
    made = built(folder, what, **given)
    assert made.weights is not None
    gone = weakref.ref(made.weights.loaded.decoder)
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            made.adopt(made.weights.prepare(file, expected=0))  # type: ignore[union-attr]
            with pytest.raises(Unavailable, match="have not ended"):
                made.core.check_weights_free()

    try:
        old = every(made)
        assert all(one != other for one, other in zip(old, new, strict=True))
        found = drive(made.core, ASKED, apart=4, each=each)
        assert [said(messages) for messages in found] == [*old[:2], *new[2:]]
        assert every(made) == new
        assert made.profile.fingerprint == fingerprint
        assert list(made.runner.models) == [1]
        assert gone() is None
    finally:
        made.close()


@pytest.mark.slow("Two updates, each compared with a fresh engine over 60 tokens")
@pytest.mark.parametrize("way", ["GPU, CPU", *thorough("ranks")])
def test_steps_go_on_while_processes_prepare(way: str, tmp_path: Path) -> None:
    """Preparation is not in the way of computation; it happens twice with deltas."""
    what, given = WAYS[way]
    folder = FORMATS["dense"](tmp_path / "one", 0)
    made = built(folder, what, **given)
    try:
        for number in range(2):
            delta = {name: tensor * 0.25 for name, tensor in tensors_of(folder).items() if "layers" in name}
            now = tensors_of(folder)
            new = {each: (now[each].float() + tensor.float()).to(now[each].dtype) for each, tensor in delta.items()}
            folder = changed(folder, new, tmp_path / f"changed{number}")
            [before] = drive(made.core, [request(60)])
            file = WeightFile(written(tmp_path / f"{number}.safetensors", delta), delta=True)
            assert said(over(made, file, request(60))) == said(before)
            [after] = drive(made.core, [request(60)])
            expected = built(folder, what, **given)
            try:
                assert said(after) == said(drive(expected.core, [request(60)])[0]) != said(before)
            finally:
                expected.close()
    finally:
        made.close()


@pytest.mark.slow("Two divided engines answer four requests, one of them three times")
@pytest.mark.parametrize(
    ("where", "way"),
    [
        ("reckoned in another", "stages"),  # a CPU reckons with nothing
        *thorough(
            ("in another", "ranks"),
            ("reckoned in the first", "stages"),
            ("reckoned in another", "ranks"),
            ("in another", "GPU, CPU"),
            ("in the first", "ranks"),
        ),
    ],
)
def test_where_one_process_cannot_all_stay_as_they_are(
    where: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests on their way go on; the process without room is named, as with one GPU. Then all can."""
    what, given = WAYS[way]
    if where == "reckoned in another":
        what = "has_no_room"
    folder, file, after = folders(tmp_path, "dense")
    device = LateDevice()
    made = built(folder, what, stand_in=device, **given)
    assert made.weights is not None
    live, loaded, prepare = made.weights, made.weights.loaded, follower_group.FollowerGroup.prepare
    steps, failed = 0, list[MotleyError]()

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps != 6:
            return
        with monkeypatch.context() as patch:
            if where == "reckoned in the first":
                patch.setattr(device, "free", 0)
            elif where == "in the first":
                patch.setattr(loaded.decoder.ops, "linear", fails)
            elif where == "in another":
                lost = tmp_path / "gone.safetensors"
                patch.setattr(
                    follower_group.FollowerGroup, "prepare", lambda ranks, version, _: prepare(ranks, version, lost)
                )
            with pytest.raises(MotleyError) as met:
                live.prepare(file)
        failed.append(met.value)

    try:
        old = every(made)
        assert [said(messages) for messages in drive(made.core, ASKED, apart=4, each=each)] == old
        [error] = failed
        if where == "in another":
            assert isinstance(error, CheckpointError)
            assert "1 could not take it" in error.message
        else:
            assert isinstance(error, Unavailable)
            assert error.code == "no_room"
            assert error.message.endswith(" 1 could not take it)") == (where == "reckoned in another")
        assert (live.version, live.loaded, list(made.runner.models)) == (0, loaded, [0])
        made.adopt(live.prepare(file, expected=0))
        assert every(made) == fresh(after, "dense", way)[0]
    finally:
        made.close()


@pytest.mark.slow("Two processes capture every graph for both versions of the weights")
def test_replays_are_of_the_version_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of the graph; ranks let go of those of a version with it, and an idle engine has them again."""
    monkeypatch.setattr(engine_builder, "UPDATE_WARM_UP_S", 60.0)
    for where in ("decode_graphs", "gpu_runner"):
        monkeypatch.setattr(f"motley.replicas.gpu.{where}.MAX_GRAPHS", 4)
    folder, file, _ = folders(tmp_path, "dense")
    made = built(folder, **RANKS)
    assert made.group is not None
    assert made.weights is not None
    assert isinstance(made.runner, GpuRunner)
    assert made.runner.graphs is not None
    sent: list[dict[str, Any]] = []
    broadcast = made.group.broadcast
    monkeypatch.setattr(made.group, "broadcast", lambda fields: sent.append(fields) or broadcast(fields))
    try:
        made.rates = lambda core: (EngineRates(1000.0, (0.01,) * len(PROFILED_BATCH_SIZES), 0.0), "reckoned")
        made.warm_up()
        before = made.runner.graphs.captured
        made.adopt(made.weights.prepare(file))
        assert {key._replace(weights=1) for key in before} == set(made.runner.graphs.captured)
        captures = {fields["capture"]: fields["weights"] for fields in sent if "capture" in fields}
        assert list(captures.values()) == [0] * len(before) + [1] * len(before)
        drive(made.core, [request()])
        replayed = {captures[fields["replay"]] for fields in sent if "replay" in fields}
        assert replayed == {1}
    finally:
        made.close()


def test_a_process_that_is_lost_while_it_prepares_ends_the_engine(tmp_path: Path) -> None:
    folder, file, _ = folders(tmp_path, "dense")
    made = built(folder, **RANKS)
    try:
        assert made.group is not None
        assert made.weights is not None
        [follower] = made.group._followers
        follower.kill()
        with pytest.raises(EngineLost):
            made.weights.prepare(file)
        assert made.weights.version == 0
    finally:
        made.close()


class Nothing:
    """A model whose calls leave a number."""

    def __init__(self, number: int, seen: list[int]) -> None:
        self.ops = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
        self._number, self._seen = number, seen

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._seen.append(self._number)
        return hidden


def test_a_rank_lets_go_of_graphs_with_their_weights() -> None:
    """Not before what was launched of them is done. A number that has gone so is dropped by the first rank later."""
    seen: list[int] = []
    models = {number: Nothing(number, seen) for number in range(2)}
    others = [weakref.ref(model) for model in models.values()]
    versions: Any = SimpleNamespace(decoder=models.__getitem__)
    exchange: Any = SimpleNamespace(broadcast=lambda x: x)
    device = LateDevice(recorded=False)
    rank = _GpuRank(versions, [], exchange, device)
    call = {"method": "logits", "hidden": [1, 4]}
    for number in range(2):
        rank.handle_message({**call, "weights": number, "capture": 10 + number, "drop": []})
    seen.clear()
    for number in (10, 11, 10):
        rank.handle_message({"replay": number})
    rank.forget(0)
    assert seen == [0, 1, 0]
    del models[0]
    assert [other() is None for other in others] == [True, False]
    rank.handle_message({**call, "weights": 1, "capture": 12, "drop": [10]})
    seen.clear()
    for number in (11, 12):
        rank.handle_message({"replay": number})
    with pytest.raises(KeyError):
        rank.handle_message({"replay": 10})
    device.mark().wait()
    assert seen == [1, 1]
