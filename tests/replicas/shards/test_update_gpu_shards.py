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
from driven import drive
from gptq_files import build_gptq
from late_device import LateDevice
from late_exchange import LateExchange
from late_shards import MIXED, RANKS, STAGES, built, followers
from new_weights import changed, of_another, tensors_of, written
from tiny_checkpoints import build_checkpoint

from motley.replicas import build
from motley.replicas.build import BuiltEngine
from motley.replicas.errors import CheckpointError, EngineLost, MotleyError, Unavailable
from motley.replicas.gpu.runner import GpuRunner
from motley.replicas.protocol import BATCHES, Request, SamplingParams, StreamMessage
from motley.replicas.rates import Rates
from motley.replicas.shards import group
from motley.replicas.shards.gpu_follower import _Rank
from motley.replicas.updates.file import WeightFile

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
NEW = ("embed_tokens", "layers.1.", "layers.3.")  # of the first process, of the others, and of what ranks sum and gather


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group, "CollectiveExchange", LateExchange)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    yield
    assert followers() == []


def request(tokens: int = 30, **given: Any) -> Request:
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


def fresh(folder: Path, what: Any, way: dict[str, Any]) -> tuple[list[Any], str]:
    made = built(folder, what, **way)
    try:
        return every(made), made.profile.fingerprint
    finally:
        made.close()


class Beside:
    """Prepares in a thread of its own, as a replica does; `steps` were made meanwhile."""

    def __init__(self, made: BuiltEngine, file: WeightFile) -> None:
        assert made.weights is not None
        self._prepared: list[Any] = []
        self._prepare, self._made, self.steps = made.weights.prepare, made, 0
        self._thread = threading.Thread(target=lambda: self._prepared.append(self._prepare(file)))

    def __call__(self) -> None:
        self._thread.start()
        while self._thread.is_alive():
            if self._made.core.busy:
                self._made.core.step()
                self.steps += 1
        [prepared] = self._prepared
        self._made.adopt(prepared)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_has_begun_ends_on_the_weights_that_it_began_with(name: str, way: str, tmp_path: Path) -> None:
    """Tokens and log-probabilities are those of engines of either checkpoint, to the bit; steps of both versions, and
    graphs where there are any, follow each other. Nothing of the old is left in any process: see late_follower.py.
    """
    what, given = WAYS[way]
    folder, file, after = folders(tmp_path, name)
    (new, fingerprint), (old, _) = fresh(after, what, given), fresh(folder, what, given)
    assert all(one != other for one, other in zip(old, new, strict=True))
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
        found = drive(made.core, ASKED, apart=4, each=each)
        assert [said(messages) for messages in found] == [*old[:2], *new[2:]]
        assert every(made) == new
        assert made.profile.fingerprint == fingerprint
        assert list(made.runner.models) == [1]
        assert gone() is None
    finally:
        made.close()


@pytest.mark.parametrize("way", ["ranks", "stages", "GPU, CPU"])
def test_steps_go_on_while_processes_prepare(way: str, tmp_path: Path) -> None:
    """What is prepared is not in the way of what is computed; of deltas, twice."""
    what, given = WAYS[way]
    folder = FORMATS["dense"](tmp_path / "one", 0)
    made = built(folder, what, **given)
    try:
        for number in range(2):
            delta = {name: tensor * 0.25 for name, tensor in tensors_of(folder).items() if "layers" in name}
            now = tensors_of(folder)
            new = {each: (now[each].float() + tensor.float()).to(now[each].dtype) for each, tensor in delta.items()}
            folder = changed(folder, new, tmp_path / f"changed{number}")
            [before] = drive(made.core, [request(200)])
            made.core.add(0, request(200))
            begun: list[StreamMessage] = []
            while not begun:
                begun += [emission.message for emission in made.core.step()]
            file = WeightFile(written(tmp_path / f"{number}.safetensors", delta), delta=True)
            update = Beside(made, file)
            update()
            assert update.steps
            [after] = drive(made.core, [request(200)])
            expected = built(folder, what, **given)
            try:
                assert said(after) == said(drive(expected.core, [request(200)])[0]) != said(before)
            finally:
                expected.close()
    finally:
        made.close()
