"""Grammars made to hang, to eat memory or to crash: refused within their limits, while a neighbour gets its tokens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from service_checkpoint import build

from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import DeadlineExceeded, InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process import compile_queue
from motley.replicas.grammar.process.grammar_process import GrammarProcess
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request


def _nested(depth: int, name: str = "a") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {name: schema}}, {"type": "array", "items": schema}]}
    return schema


def _tripling(depth: int) -> dict[str, Any]:
    rules: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 3, "items": False}
        for i in range(depth)
    }
    return {"$defs": rules | {f"d{depth}": {"type": ["string", "null"]}}, "$ref": "#/$defs/d0"}


def _doubling(depth: int) -> str:
    rules = [f"r{i} ::= r{i + 1} r{i + 1} r{i + 1}" for i in range(1, depth)]
    return "\n".join(["root ::= r1 r1 r1", *rules, f'r{depth} ::= "a" | ""'])


POWER = "((a{1,100}){1,100}){1,100}"
# All of these are accepted as grammars; what they cost shows when they are compiled, or not before they match.
HOSTILE = {
    "a power of repetitions": GrammarSpec.regex(POWER),
    "ambiguous rules": GrammarSpec.ebnf(_doubling(20)),
}
# These cost much and are borne: they take time from nobody but their own.
HEAVY = {
    "ambiguous recursion": GrammarSpec.ebnf('root ::= s\ns ::= "" | "a" s | s "a" s | s s'),
    "a power of repetitions in a schema": GrammarSpec.json_schema({"type": "string", "pattern": POWER}),
    "nested choices": GrammarSpec.json_schema(_nested(9)),
    "definitions that triple": GrammarSpec.json_schema(_tripling(15)),
    "many optional properties": GrammarSpec.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}
    ),
}


def _request(spec: GrammarSpec | None, **given: Any) -> Request:
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "grammar": spec} | given
    return Request("r", (1, 2, 3), SamplingParams(**sampling))


async def _tokens(worker: Worker, request: Request) -> list[int]:
    return [token async for message in worker.generate(request) for d in message.deltas for token in d.token_ids]


@pytest.fixture(scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    with pytest.MonkeyPatch.context() as patch:  # that they are kept to is what matters, not how long they are
        patch.setattr(compile_queue, "LAST_CPU_S", 0.6)
        async for worker in _started(tmp_path_factory):
            yield worker


async def _started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    worker = Worker(build(tmp_path_factory.mktemp("hostile")), EngineConfig(threads=1))
    await worker.start()
    await _tokens(worker, _request(GrammarSpec.regex("ready")))
    yield worker
    await worker.close()


@pytest.mark.parametrize("name", [*HOSTILE, *HEAVY])
async def test_a_hostile_grammar_ends_and_its_neighbour_does_not_notice(
    worker: Worker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end being compiled before its neighbour has a whole answer, which has a token in every step."""
    spec = (HOSTILE | HEAVY)[name]
    alone = await _tokens(worker, _request(None))
    compiling, answered = threading.Event(), threading.Event()
    real = GrammarProcess.compile

    def held(process: GrammarProcess, cpu_s: float) -> bool:
        done = real(process, cpu_s)
        compiling.set()
        assert answered.wait(60), "its neighbour waits for it"
        return done

    monkeypatch.setattr(GrammarProcess, "compile", held)
    before = worker.load().steps
    hostile = asyncio.create_task(_outcome(worker, spec, 200 if name in HOSTILE else 12))
    beside = [await _tokens(worker, _request(None))]
    steps = worker.load().steps - before
    answered.set()
    assert not hostile.done()
    beside.append(await _tokens(worker, _request(None)))  # now beside its tokens, if it comes to have any
    outcome = await hostile
    assert compiling.is_set()
    assert beside == [alone] * 2
    assert len(alone) <= steps <= len(alone) + 2, "a token in every step"
    assert outcome == "grammar_too_complex" if name in HOSTILE else outcome in ("grammar_too_complex", None)
    if name in HOSTILE:  # remembered: nothing is compiled again
        grammars = worker._engine.core.grammars  # type: ignore[union-attr]
        assert isinstance(grammars.prepare(spec).exception(0), InvalidRequest)  # type: ignore[union-attr]


async def _outcome(worker: Worker, spec: GrammarSpec, max_tokens: int = 200) -> str | None:
    try:
        await _tokens(worker, _request(spec, logit_bias={64: 100.0}, max_tokens=max_tokens))
    except InvalidRequest as refused:
        return refused.code if refused.param == spec.field else None
    return None


async def test_what_takes_longer_than_the_first_try_is_compiled_at_the_second(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []
    real = GrammarProcess.compile

    def noted(process: GrammarProcess, cpu_s: float) -> bool:
        tries.append(real(process, cpu_s))
        return tries[-1]

    monkeypatch.setattr(compile_queue, "FIRST_CPU_S", 1e-3)  # the timer's own grain is a few times as much
    monkeypatch.setattr(GrammarProcess, "compile", noted)
    properties = {f"again{i}": {"type": "integer"} for i in range(300)}
    slow = GrammarSpec.json_schema({"type": "object", "properties": properties})
    assert await _outcome(worker, slow) is None
    assert tries == [False, True]


async def test_the_deadline_counts_while_it_is_compiled(worker: Worker) -> None:
    slow = GrammarSpec.json_schema(_nested(9, "late"))
    with pytest.raises(DeadlineExceeded):
        await _tokens(worker, replace(_request(slow), deadline_s=0.05))


async def test_a_client_that_leaves_while_it_is_compiled(worker: Worker) -> None:
    leaving = asyncio.create_task(_tokens(worker, _request(GrammarSpec.json_schema(_nested(9, "left")))))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert worker.num_streams == 0
    assert await _tokens(worker, _request(GrammarSpec.regex("ready")))


async def test_memory_has_a_limit(worker: Worker) -> None:
    words = [f"{i:x}{'ab' * (i % 40)}" for i in range(900)]
    spec = GrammarSpec.regex("(" + "|".join(words) + "){1,4000}")
    outcome = await _outcome(worker, spec)
    assert outcome in ("grammar_too_complex", None)  # it may just fit
    code = (
        "from motley.replicas.grammar.process import grammar_worker as child\n"
        "child.limit_memory(child.MEMORY_BYTES)\n"
        "held = bytearray(child.MEMORY_BYTES // 2)\n"
        "try:\n    bytearray(child.MEMORY_BYTES)\nexcept MemoryError:\n    print('limited')\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == "limited"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: GrammarSpec.regex("a" * 70_000), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema("[" * 60_000), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema(_nested(100)), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema({"anyOf": [{"type": "null"}] * 5000}), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema({"type": "array", "minItems": 10**9}), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema({"type": "string", "maxLength": 10**30}), "grammar_too_complex"),
        (lambda: GrammarSpec.json_schema('{"a": ' + "9" * 5000 + "}"), "invalid_grammar"),
        (lambda: GrammarSpec.json_schema({"$ref": "#"}), "invalid_grammar"),
        (lambda: GrammarSpec.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}}), "invalid_grammar"),
    ],
)  # fmt: skip
def test_sizes_are_refused_before_anything_is_compiled(make: Any, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert (refused.value.param, refused.value.code) == ("grammar", code)
