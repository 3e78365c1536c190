"""Part of `motley bench prefix`: how a model's answers change when its KV was computed in other numerics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.replicas.demo import demo_path
from motley.replicas.engine.startup.engine_builder import BuiltEngine, assemble_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.runner import ModelRunner
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import row
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.kv.prefix.rounding_trial import RoundingTrial
from motley.replicas.kv.store.host_kv import HostKv
from motley.replicas.kv.store.sealed_record import Geometry
from motley.replicas.loading.model_loader import load_model
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import BLOCK_TOKENS

__all__ = ["WAYS", "ForeignKvDeviation", "NumericsPlan", "measure_deviations", "measure_numerics"]

# The dtypes in which KV is computed, stored and read. fp32 stands for fp16, which CPUs do not compute in: KV that was
# stored in float16 is the same in both. The first row is the control.
WAYS = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float16", "bfloat16"),
    ("bfloat16", "float16", "float32"),
    ("float32", "float16", "bfloat16"),
    ("float32", "float16", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "int8", "bfloat16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsPlan:
    """Settings of the measurement.

    ways    dtypes in which KV is computed, stored and read
    prefix  tokens whose KV comes from a record
    probed  tokens after the prefix whose logits are compared
    texts   number of pieces of held-out text
    folder  checkpoint of the model; by default the demo model, which knows its text by heart
    text    file with the held-out text; by default that of the demo model
    """

    ways: Sequence[tuple[str, str, str]] = WAYS
    prefix: int = 512
    probed: int = 64
    texts: int = 7
    folder: Path = field(default_factory=demo_path)
    text: Path = field(default_factory=lambda: demo_path() / "heldout.txt")

    @property
    def model(self) -> str:
        return "demo" if self.folder == demo_path() else self.folder.name


@dataclass(frozen=True, slots=True)
class ForeignKvDeviation:
    """Difference between a reader's predictions with KV from a record and with its own KV, after the prefix.

    nats    mean KL divergence of the next token's distribution
    logit   largest difference of a logit
    others  share of positions at which another token is the likeliest
    """

    nats: float
    logit: float
    others: float


class _DtypeEngine:
    """Engine of the model in one dtype, on this machine's CPU."""

    def __init__(self, dtype: str, plan: NumericsPlan) -> None:
        config = EngineConfig(dtype=dtype, threads=usable_cores(), prefix_cache="memory", kv_memory_bytes=2**26)
        self.ops, why = choose_operators(config, inspect_checkpoint(plan.folder).config.dtype)
        loaded = load_model(plan.folder, self.ops)
        self.shape, self._plan = loaded.config, plan
        self._built: BuiltEngine = assemble_engine(loaded, config, self.ops, name=plan.model, why=why)

    def close(self) -> None:
        self._built.close()

    @contextmanager
    def trial(self, wire: str) -> Iterator[RoundingTrial]:
        runner, plan = self._built.runner, self._plan
        assert isinstance(runner, ModelRunner)
        assert runner.swapper is not None
        shape = self.shape
        geometry = Geometry(wire, shape.num_layers, *shape.kv_shape, plan.prefix)
        host = HostKv(runner.swapper.slabs(), self.ops.kv_vectors, geometry)
        blocks = blocks_for(plan.prefix + plan.probed)
        with BlockPool(blocks).open(()) as allocation:
            allocation.grow(plan.prefix + plan.probed)
            yield RoundingTrial(runner, runner.swapper, host, range(plan.prefix // BLOCK_TOKENS), allocation)


def measure_numerics(plan: NumericsPlan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for (computed, wire, read), each in measure_deviations(plan, say):
        workload = {
            "computed_in": computed, "records_in": wire, "read_in": read, "prefix_tokens": plan.prefix,
            "tokens": plan.probed * len(each),
        }  # fmt: skip
        rows += [
            row("numerics_kl", workload, "nats a token", [one.nats for one in each]),
            row("numerics_logit", workload, "largest difference", [max(one.logit for one in each)]),
            row("numerics_other_token", workload, "share", [math.fsum(one.others for one in each) / len(each)]),
        ]
    return rows


def measure_deviations(
    plan: NumericsPlan, say: Callable[[str], None]
) -> Iterator[tuple[tuple[str, str, str], list[ForeignKvDeviation]]]:
    """Yield for each way of `plan.ways` the differences of each text.

    Raises InvalidRequest for a text that is too short, and where the model's KV does not fit a dtype.
    """
    whole = plan.prefix + plan.probed
    ids = Tokenizer.load(plan.folder).encode(plan.text.read_text(encoding="utf-8"))
    if len(ids) < plan.texts * whole:
        message = f"text: it has {len(ids):,} tokens; expected at least {plan.texts} times {whole}"
        raise InvalidRequest(message, param="text")
    texts = [ids[i * whole : (i + 1) * whole] for i in range(plan.texts)]
    sides = {dtype: _DtypeEngine(dtype, plan) for dtype in sorted({dtype for way in plan.ways for dtype in way[::2]})}
    try:
        for way in plan.ways:
            computed, wire, read = way
            say(f"KV computed in {computed}, stored in {wire}, read in {read}")
            with sides[computed].trial(wire) as writer, sides[read].trial(wire) as reader:
                yield way, [_measure_deviation(writer, reader, tokens) for tokens in texts]
    finally:
        for side in sides.values():
            side.close()


def _measure_deviation(writer: RoundingTrial, reader: RoundingTrial, tokens: Sequence[int]) -> ForeignKvDeviation:
    prefix, rest = tokens[: writer.prefix_tokens], tokens[writer.prefix_tokens :]
    writer.compute(prefix)
    record = writer.record()
    if record is None:
        raise InvalidRequest("model: its KV is outside the range of a dtype of records", param="model")
    reader.compute(prefix)
    own = reader.logits(rest)
    if not reader.restore(record):
        raise InvalidRequest("model: its KV is outside the range of a dtype that reads", param="model")
    given = reader.logits(rest)
    logs, others = own.log_softmax(-1), given.log_softmax(-1)
    return ForeignKvDeviation(
        nats=float((logs.exp() * (logs - others)).sum(-1).mean()),
        logit=float((own - given).abs().max()),
        others=float((own.argmax(-1) != given.argmax(-1)).float().mean()),
    )
