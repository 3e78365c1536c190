"""How fast an engine is, for those who predict: measured at warm-up, or reckoned where nothing is computed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.device.precision import GEMM_ROWS
from .protocol import BATCHES, BLOCK_TOKENS, Request
from .sampling_params import SamplingParams

if TYPE_CHECKING:  # who only predicts needs no engine
    from .engine import EngineCore

__all__ = ["Rates", "begin", "extrapolated", "measured"]

BUDGET_S = 1.0  # what is expected to take longer than is left of it is not measured
PROMPT_S = 0.5  # likewise, of one prompt
NOISE_S = 0.1  # a prompt that takes longer, and about what was expected, is run once
_UNEXPECTED = 1.2  # times as long as that is what the first run costs more
_STEPS = 8
_FIRST_STEPS = 4  # of the first output: a replica that finds its rates kept waits for no more
_PROMPT_TOKENS = 16  # of the first and shortest prompt
_GROWTH = 4
_KNOTS = (1, 4, 16, GEMM_ROWS, GEMM_ROWS + 1, 256)  # batches that are measured; those between are interpolated
_PROMPTS = 3  # of as many tokens as a batch that is never run has sequences: rows of both are computed alike
_SIBLINGS = 8  # sequences that the price of context is measured with
_CONTEXT = 2048  # tokens of each, at most
_LEAST_CONTEXT = 64  # below it the price is lost in the noise
_SALT = b"warm-up"


@dataclass(frozen=True, slots=True)
class Rates:
    """decode_s: seconds of a step at each of BATCHES, with short contexts; context_s: more, per token of context."""

    prefill_tokens_per_s: float
    decode_s: tuple[float, ...]
    context_s: float


def measured(core: EngineCore, *, compiles: bool = False) -> Rates:
    """Runs a prompt and a batch, and what PROMPT_S and BUDGET_S allow beside them. The engine is idle before and after.

    What a batch costs the first time, kernels compiled and graphs captured, is not of the budget: a request would wait.

    compiles  kernels, for as many tokens as a step may have too: such a prompt is run whatever it takes
    """
    known = {1: begin(core)}
    rate = _prefill_rate(core, known[1], compiles=compiles)
    left, least = BUDGET_S, 0.0
    most = min(core.scheduler.max_running, core.scheduler.pool.total)
    for batch in _KNOTS:
        steps = _STEPS + 1 if batch <= most else _PROMPTS
        if steps * extrapolated(known, rate, (batch,))[0] > left or batch > max(most, _prompt_tokens(core)):
            break
        seconds = _step_s(core, batch) if batch <= most else _prompt_s(core, batch, 4 + _PROMPTS * len(known))
        if seconds is None:
            break
        known[batch] = least = max(least, seconds)  # what is less is noise
        left -= steps * known[batch]
    return Rates(rate, extrapolated(known, rate), _context_s(core, known, rate, left))


def extrapolated(known: dict[int, float], prefill_rate: float, at: Sequence[int] = BATCHES) -> tuple[float, ...]:
    """Seconds of a step at each of `at`, from those `known` at some batches, at 1 above all.

    Between two that are known a straight line; beyond the last one as steep as the last two, and no less than a
    prompt's tokens cost: rows of a batch are computed like those.
    """
    batches = sorted(known)
    slope = 1 / prefill_rate
    high = batches[-1]
    if low := max((each for each in batches if 2 * each <= high), default=0):  # nearer ones may tell of a jump
        slope = max(slope, (known[high] - known[low]) / (high - low))
    found = []
    for batch in at:
        above = next((each for each in batches if each >= batch), None)
        if above is None:
            found.append(known[batches[-1]] + (batch - batches[-1]) * slope)
            continue
        below = max((each for each in batches if each <= batch), default=above)
        share = (batch - below) / (above - below) if above > below else 0.0
        found.append(known[below] + share * (known[above] - known[below]))  # of two that are alike, the same
    return tuple(found)


def begin(core: EngineCore) -> float:
    """Seconds of a decode step (median): of a short prompt, whose first steps are those that cost more, and its output.

    The engine is idle before and after.
    """
    params = SamplingParams(temperature=0.0, max_tokens=_FIRST_STEPS + 1, ignore_eos=True, seed=0)
    length = min(_PROMPT_TOKENS, _prompt_tokens(core))
    core.add(-1, Request("warm-up", _prompt(core, length, 0), params, cache_salt=_SALT))
    steps = [seconds for seconds, _ in _steps(core)]
    return statistics.median(steps[2:] or steps)


def _prefill_rate(core: EngineCore, decode_s: float, *, compiles: bool) -> float:
    """Tokens per second of a full step, after `begin`, which found what one token takes: measured, or reckoned from
    the longest prompt that takes PROMPT_S at most, as weights are read once however many tokens there are.
    """
    full, number = _prompt_tokens(core), -1

    def took(tokens: int, likely: float) -> float:  # of two the less: the first may cost more, and more is noise
        nonlocal number
        number -= 2  # no prompt has another's prefix
        first = _prompt_s(core, tokens, number, 1)
        once = NOISE_S < first < _UNEXPECTED * likely
        return first if once else min(first, _prompt_s(core, tokens, number + 1, 1))

    length = min(_PROMPT_TOKENS, full)
    seconds = took(length, 0.0)

    def expected(tokens: int) -> float:
        slope = max(0.0, seconds - decode_s) / max(1, length - 1)
        return seconds + slope * (tokens - length)

    while length < full and expected(longer := min(_GROWTH * length, full)) <= PROMPT_S:
        length, seconds = longer, took(longer, expected(longer))
    if compiles and length < full:
        return full / took(full, 0.0)  # twice, whatever compiling takes
    return full / expected(full)


def _step_s(core: EngineCore, batch: int) -> float | None:
    """Of so many sequences that have just begun. The first steps of a batch may cost more: they are not counted.

    None: sequences are so short that there was no such step.
    """
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True, seed=0)
    for number in range(batch):
        core.add(-1 - number, Request("warm-up", _prompt(core, 2, number), params, cache_salt=_SALT))
    full = [seconds for seconds, decodes in _steps(core) if decodes == batch]
    return statistics.median(full[1:] or full) if full else None


def _prompt_s(core: EngineCore, tokens: int, number: int, prompts: int = _PROMPTS) -> float:
    """Of a prompt of so many tokens, alone; the first one's number, and others after it: none has another's prefix."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    seconds = []
    for other in range(number, number + prompts):
        core.add(-1, Request("warm-up", _prompt(core, tokens, other), params, cache_salt=_SALT))
        seconds.append(_steps(core)[0][0])
    return statistics.median(seconds)


def _context_s(core: EngineCore, known: dict[int, float], rate: float, left_s: float) -> float:
    """Of a step's time what each token of context takes; none where it cannot be told."""
    scheduler = core.scheduler
    siblings = min(_SIBLINGS, scheduler.max_running) if scheduler.pool.reuse_prefixes else 1
    step_s = extrapolated(known, rate, (siblings,))[0]
    length = min(
        _CONTEXT,
        core.limits.max_model_len - _STEPS - 1,
        (scheduler.pool.total - 2 * siblings) * BLOCK_TOKENS,
        int(rate * (left_s - (_STEPS + 1) * step_s)),
    )
    if length < _LEAST_CONTEXT:
        return 0.0
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True, seed=0, n=siblings)
    core.add(-1, Request("warm-up", _prompt(core, length, 3), params, cache_salt=_SALT))
    full = [seconds for seconds, decodes in _steps(core) if decodes == siblings]
    if not full:
        return 0.0
    return max(0.0, statistics.median(full[1:] or full) - step_s) / (siblings * length)


def _steps(core: EngineCore) -> list[tuple[float, int]]:
    """Until the engine is idle: seconds of each step, and how many sequences it decoded if that was all it did.

    Of a pipeline, a step of all of them: each of those on their way has a part of the sequences.
    """
    found = []
    landed, began = core.num_steps, time.perf_counter()
    while core.busy:
        load = core.load()
        core.step()
        if core.num_steps > landed:  # a step may be launched by one call and land in the next
            landed, now = core.num_steps, time.perf_counter()
            only_decodes = not load.waiting and not load.queued_prefill_tokens
            parts = min(core.scheduler.lanes, max(1, load.running)) if only_decodes else 1
            found.append(((now - began) * parts, load.running if only_decodes else 0))
            began = now
    return found


def _prompt_tokens(core: EngineCore) -> int:
    """Of a prompt that fills a step, which is how a long one is read."""
    return max(1, min(core.limits.max_model_len - _STEPS - 1, core.scheduler.max_batch_tokens))


def _prompt(core: EngineCore, length: int, number: int) -> tuple[int, ...]:
    return tuple((token * 7 + number) % core.limits.vocab_size for token in range(length))
