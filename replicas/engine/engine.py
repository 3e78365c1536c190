"""Engine core: the loop that plans, runs and commits one step after another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from ..errors import EngineFault, EngineLost, InvalidRequest, MotleyError, Unavailable
from ..execution.runner import CapturingRunner, ForwardModel, PiecewiseModel, Runner, UpdatableRunner
from ..execution.step_plan import StepResult
from ..grammar.grammar_spec import GrammarSpec
from ..grammar.process.grammar_compiler import GrammarCompiler
from ..grammar.process.grammar_process import GrammarProcess, MatchState, collect_masks
from ..text.tokenizer.text_stream import TextStream
from ..text.tokenizer.tokenizer import Tokenizer
from ..types import Delta, FinishReason, ReplicaLoad, Request, StreamMessage, TokenLogprob, join_deltas
from .engine_request import EngineRequest, StepOutput, add_prompt_logprobs, build_message, replay_output
from .engine_timings import EngineTimings
from .inflight_steps import InflightStep, InflightSteps
from .model_limits import ModelLimits
from .scheduler import Scheduler
from .sequence import Sequence

__all__ = ["EngineCore", "StepOutput"]

_CAUTIOUS_TOKENS = 16  # tokens after which a grammar that was late once is expected to be in time again
_IDLE_S = 0.02  # a step with nothing to compute waits this long for a grammar to say which tokens may follow
_STORE_S = 0.005  # a step with nothing to compute waits this long for a prefix store


class EngineCore:
    """Engine core, which takes requests and returns emissions, one step at a time. Not thread-safe: one thread owns it.

    A request is identified by the caller's own integer key, never by a client's request id.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.grammars = grammars
        self.num_steps = 0
        self.timings = EngineTimings()
        self._runner = runner
        self._capturing = runner if isinstance(runner, CapturingRunner) else None
        self._inflight = InflightSteps(runner, scheduler)
        self._tokenizer = tokenizer
        self._clock = clock
        self._now = 0.0  # when the last step's result came
        self._jobs: dict[int, EngineRequest] = {}
        self._texts: dict[int, TextStream | None] = {}  # by sequence id
        self._job_of: dict[int, EngineRequest] = {}  # by sequence id
        self._ids = itertools.count()
        self._ready: dict[int, EngineRequest] = {}  # jobs with something to send
        self._held: set[int] = set()  # keys of jobs whose clients read too slowly
        self._matching: dict[int, Sequence] = {}  # sequences with a grammar, by sequence id
        self._rematching: dict[int, Future[GrammarProcess]] = {}  # what they wait for whose process was stopped
        self._older: list[int] = []  # versions of weights that sequences may still end on

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def launched(self) -> bool:
        """Whether steps are in flight whose results are not known, or KV waits to be written to the prefix store."""
        return bool(self._inflight.ahead) or self.scheduler.prefixes.pending

    def capture_s(self) -> float:
        """Return the seconds that steps have spent on graph captures since the start; these say nothing of the steps'
        pace. Safe from any thread.
        """
        return 0.0 if self._capturing is None else self._capturing.capture_s()

    def longest_capture_s(self) -> float:
        """Return the seconds that the longest completed graph capture took; 0 before the first. Safe from any
        thread.
        """
        return 0.0 if self._capturing is None else self._capturing.longest_s()

    @property
    def failed_steps(self) -> int:
        """Number of steps in a row, up to now, that failed and gave no result."""
        return self._inflight.failed_steps

    @property
    def waits_for_readers(self) -> bool:
        """Whether there are requests and yet nothing to compute, as the client of every request reads too slowly."""
        return bool(self._held) and len(self._held) == len(self._jobs) and not (self._ready or self.launched)

    def adopt(self, version: int, model: ForwardModel | PiecewiseModel) -> None:
        """Compute requests that have not begun, and later ones, with other weights. Called between two steps.

        Requests that have begun finish on the weights which they began with. Raises Unavailable while some of those
        still use weights older than the present ones.
        """
        scheduler = self.scheduler
        assert isinstance(self._runner, UpdatableRunner), "this runner has no weights"
        self.check_weights_free()
        begun = {
            s for job in self._jobs.values() if job.opened or job.deltas or _any_started(job.live) for s in job.live
        }
        self._runner.adopt(version, model)
        self._older.append(scheduler.weights)
        scheduler.renew(version, begun)

    def check_weights_free(self) -> None:
        """Raise Unavailable while requests finish on weights older than the newest. Safe from any thread."""
        if self._older:
            raise Unavailable(
                "requests that began before the latest weights have not ended; try again when they have",
                code="weights_in_use",
            )

    def let_go(self) -> None:
        """Free the older weights, once no sequence and no step in flight is computed with them. Raises EngineLost."""
        on_its_way = any(flight.plan.weights in self._older for flight in self._inflight.ahead)
        if self._older and not self.scheduler.outdated and not on_its_way:
            assert isinstance(self._runner, UpdatableRunner)
            for version in self._older:
                self._runner.forget(version)
            self._older = []

    def load(self) -> ReplicaLoad:
        return replace(self.scheduler.load(), steps=self.num_steps)

    def forget_counts(self) -> None:
        """Count from 0 again: what was computed until now was no client's."""
        self.timings = EngineTimings()
        self.scheduler.forget_counts()

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if this model cannot serve the request."""
        self.limits.check(request)
        for name in ("stop", "bad_words"):
            if self._tokenizer is None and getattr(request.sampling, name):
                raise InvalidRequest(f"{name}: this model has no tokenizer", param=name)
        if request.sampling.bad_words and self._tokenizer is not None:
            if self._tokenizer.uses_own_process:
                message = "bad_words: not supported with this model's tokenizer, which may take long for a short text"
                raise InvalidRequest(message, param="bad_words", code="unsupported_parameter")
            self._tokenizer.spellings(request.sampling.bad_words)  # raises here what it would raise later
        if (grammar := request.sampling.grammar) is not None and self.grammars is None:
            message = f"{grammar.field}: this engine has no structured output"
            raise InvalidRequest(message, param=grammar.field, code="structured_output_unavailable")

    def add(
        self,
        key: int,
        request: Request,
        arrived: float | None = None,
        grammar: GrammarProcess | None = None,
        *,
        is_probe: bool = False,
    ) -> None:
        """Add a request that `check` has accepted. Its deadline counts from `arrived`, in seconds of the engine's
        clock.

        arrived   None: now
        grammar   the request's compiled grammar, from `grammars.prepare`; None where the request has none
        is_probe  it only shows that the engine works, and counts in no metric
        """
        assert key not in self._jobs
        assert (grammar is None) == (request.sampling.grammar is None), "grammars are compiled beforehand"
        arrived = self._clock() if arrived is None else arrived
        sequences = [self._sequence(request, choice, arrived) for choice in range(request.sampling.n)]
        if grammar is not None:
            for sequence in sequences:
                sequence.matcher = grammar.open(sequence.output_ids)
        if self.scheduler.pool.reuse_prefixes:
            for sequence in sequences[1:]:
                sequence.leader = sequences[0]
        for sequence in sequences:
            sequence.is_probe = is_probe
        job = self._jobs[key] = EngineRequest(key, sequences[0], list(sequences))
        for sequence in sequences:
            self._start(job, sequence)

    def cancel(self, key: int) -> None:
        """Drop a request and free what it holds. An unknown key is ignored, since the request may just have ended."""
        job = self._jobs.pop(key, None)
        self._ready.pop(key, None)
        self._held.discard(key)
        for sequence in job.live if job else ():
            self._forget(sequence)
        if self._older:
            self.let_go()  # no step may follow

    def hold(self, key: int, wanted: bool) -> None:
        """Stop computing for a request (`wanted`), or go on. An unknown key is ignored, since the request may just have
        ended.
        """
        job = self._jobs.get(key)
        if job is None:
            return
        (self._held.add if wanted else self._held.discard)(key)
        for sequence in job.live:
            self.scheduler.hold(sequence, wanted)

    def step(self) -> list[StepOutput]:
        """Plan, run and commit one step; return the emissions that became ready.

        Where the device computes asynchronously, a step is launched before the result of the step before it is awaited.
        Raises EngineLost.
        """
        try:
            return self._step()
        except EngineLost:
            self.end()
            raise

    def end(self) -> None:
        """Free the runner's graphs, since no further step can be computed. NCCL's end waits for graphs that contain its
        exchanges.
        """
        if self._capturing is not None:
            self._capturing.close()

    def _step(self) -> list[StepOutput]:
        self._expire()
        self._end_by_grammars()
        plan = self.scheduler.plan()
        if self.scheduler.admitted:
            self.timings.admitted(self.scheduler.admitted, self._clock())
            self.scheduler.admitted = []
        if plan.swaps:
            self._inflight.swap(plan)
        launched = self._inflight.launch(plan) if plan.items else None
        landing = self._inflight.landing(launched)
        if landing is not None:
            self._land(landing)
        elif launched is not None or plan.swaps:
            pass  # its result is awaited once further steps are launched; or KV that a step needs is being copied
        elif paused := [one.matcher for one in self._matching.values() if one.matcher and one.paused and not one.held]:
            collect_masks(paused, _IDLE_S, first=True)
        elif self.scheduler.prefixes.waits:
            self.scheduler.prefixes.wait(_STORE_S)
        if self._older:
            self.let_go()
        return list(self._emit())

    def _land(self, flight: InflightStep) -> None:
        result = self._inflight.result(flight)
        self._now = self._clock()
        self.scheduler.landed(flight.plan)
        self._commit(flight, result)
        self.num_steps += 1

    def _sequence(self, request: Request, choice: int, arrived: float) -> Sequence:
        number = next(self._ids)
        params = request.sampling
        max_output_tokens = self.limits.max_model_len - len(request.prompt_ids)
        outputs = list(request.output_ids[choice]) if request.output_ids else []
        return Sequence(
            id=number,
            request=request,
            choice=choice,
            arrival=number,
            limit=len(request.prompt_ids) + min(params.max_tokens or max_output_tokens, max_output_tokens),
            eos_ids=self.limits.eos_token_ids,
            deadline=None if request.deadline_s is None else arrived + request.deadline_s,
            output_ids=outputs,
            arrived_s=arrived,
            wants_prompt_logprobs=params.prompt_logprobs is not None and choice == 0 and not any(request.output_ids),
            bad_words=self._tokenizer.spellings(params.bad_words) if self._tokenizer and params.bad_words else (),
        )

    def _start(self, job: EngineRequest, sequence: Sequence) -> None:
        self._job_of[sequence.id] = job
        if sequence.matcher is not None:
            self._matching[sequence.id] = sequence
        text = self._texts[sequence.id] = self._text(sequence.request)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.append(None)  # nothing predicts the first token
        self.scheduler.add(sequence)
        if (ended := replay_output(sequence, text)) is not None:
            self._finish(sequence, ended)

    def _text(self, request: Request) -> TextStream | None:
        if self._tokenizer is None:
            return None
        params = request.sampling
        return TextStream(
            self._tokenizer,
            prompt_ids=request.prompt_ids,
            stop=params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def _expire(self) -> None:
        now = self._clock()
        for sequence in self.scheduler.sequences:
            if sequence.deadline is not None and now >= sequence.deadline:
                self._finish(sequence, self._closing(sequence, FinishReason.DEADLINE))

    def _end_by_grammars(self) -> None:
        """Finish sequences whose text is complete by their grammar, and end requests whose grammar has failed."""
        if not self._matching:
            return
        collect_masks([sequence.matcher for sequence in self._matching.values() if sequence.matcher], 0.0)
        for sequence in list(self._matching.values()):
            if sequence.id not in self._matching or (matcher := sequence.matcher) is None:
                continue  # a sibling's failure has ended it
            if matcher.state is MatchState.DONE:
                self._finish(sequence, self._closing(sequence, FinishReason.STOP))
            elif matcher.state is MatchState.DEAD_END:
                self._drop_job(sequence, matcher.spec.invalid("the output so far does not follow it, or nothing can"))
            elif matcher.state is MatchState.LOST:
                error = matcher.process.too_complex()
                assert self.grammars is not None
                self.grammars.refuse(matcher.spec, error)
                self._drop_job(sequence, error)
            elif matcher.pending and matcher.process.stopped:
                self._rematch(sequence, matcher.spec)

    def _rematch(self, sequence: Sequence, spec: GrammarSpec) -> None:
        """Let a sequence go on in another process of its grammar, once there is one, since its own was stopped."""
        assert self.grammars is not None
        try:
            coming = self._rematching.get(sequence.id) or self.grammars.prepare(spec, sequence.request.tenant)
        except MotleyError as error:  # too many wait
            self._drop_job(sequence, error)
            return
        self._rematching[sequence.id] = coming
        if not coming.done():
            return
        del self._rematching[sequence.id]
        failed = coming.exception()
        if failed is None:
            sequence.matcher = coming.result().open(sequence.output_ids)
        elif isinstance(failed, MotleyError):
            self._drop_job(sequence, failed)
        else:
            self._drop_job(sequence, EngineFault(f"{spec.field}: {failed}", code="engine_fault"))

    def _fault(self, sequence: Sequence, message: str) -> None:
        if sequence.allocation is not None:
            sequence.allocation.withdraw()  # its KV may be wrong, so no other sequence may find it
        job = self._job_of[sequence.id]
        job.error = EngineFault(message, code="engine_fault")
        for other in list(job.live):
            self._finish(other, self._closing(other, FinishReason.ERROR))

    def _drop_job(self, sequence: Sequence, error: MotleyError) -> None:
        """End a request with an error of its grammar, and drop output of it that was not sent yet."""
        job = self._job_of[sequence.id]
        self._ready[job.key] = job
        job.error, job.deltas = error, []
        for other in job.live:
            self._forget(other)
        job.live = []

    def _commit(self, flight: InflightStep, result: StepResult) -> None:
        plan = flight.plan
        parts = zip(plan.items, flight.allocations, result.items, strict=True)
        sound = [(item, allocation) for item, allocation, outcome in parts if not outcome.fault]
        outcomes = list(zip(plan.items, result.items, strict=True))
        right = {item.sequence_id: len(outcome.accepted) for item, outcome in outcomes if outcome.accepted}
        self.scheduler.commit(sound, right)
        job_of, sequence_of = self._job_of, self.scheduler.sequence
        for item, outcome in outcomes:
            if item.sequence_id not in job_of:
                continue  # a sibling's fault has ended it within this very step
            sequence = sequence_of(item.sequence_id)
            if outcome.prompt_logprobs:
                add_prompt_logprobs(sequence, item.start, outcome.prompt_logprobs)
            if outcome.fault:
                self._fault(sequence, outcome.fault)
            elif outcome.token:
                for token in (*outcome.accepted, outcome.token) if outcome.accepted else (outcome.token,):
                    self._advance(sequence, token)
                    if sequence.finish_reason is not None:
                        break  # accepted drafts behind the end of the sequence are dropped
            elif item.sample is not None:
                sequence.matcher_wait_tokens = _CAUTIOUS_TOKENS
                self.scheduler.step_back(item)
            elif item.pooling and (embedding := sequence.pool(item.start, outcome.pooled)) is not None:
                self._job_of[sequence.id].embedding = embedding
                self._finish(sequence, Delta(sequence.choice, finish_reason=FinishReason.STOP))

    def _advance(self, sequence: Sequence, token: TokenLogprob) -> None:
        sequence.output_ids.append(token.token_id)
        if sequence.first_token_s is None and not sequence.is_probe:
            self.timings.begun(sequence, self._now)
        reason = sequence.finish_after_last()
        text = self._texts[sequence.id]
        piece = ""
        stop_reason: str | int | None = None
        if reason is FinishReason.STOP:
            stop_reason = sequence.stop_id
            if text is not None:  # the token that ends a choice is part of its text only if asked for
                shown = stop_reason is not None and sequence.request.sampling.include_stop_str_in_output
                piece = (text.push((token.token_id,)) if shown else "") + text.flush()
        elif text is not None:
            piece = text.push((token.token_id,))
            if text.stopped is not None:
                reason, stop_reason = FinishReason.STOP, text.stopped
            elif reason is not None:
                piece += text.flush()
        wanted = sequence.request.sampling.logprobs is not None
        delta = Delta(sequence.choice, (token.token_id,), piece, (token,) if wanted else None, reason, stop_reason)
        if reason is None and sequence.matcher is not None:
            sequence.matcher_wait_tokens = max(sequence.matcher_wait_tokens - 1, 0)
            sequence.matcher.accept(token.token_id)
        self._finish(sequence, delta) if reason else self._send(sequence, delta)

    def _closing(self, sequence: Sequence, reason: FinishReason) -> Delta:
        text = self._texts[sequence.id]
        return Delta(sequence.choice, text=text.flush() if text else "", finish_reason=reason)

    def _send(self, sequence: Sequence, delta: Delta) -> None:
        job = self._job_of[sequence.id]
        if job.deltas and job.deltas[-1].index == delta.index:
            delta = join_deltas([job.deltas.pop(), delta])
        job.deltas.append(delta)
        self._ready[job.key] = job

    def _finish(self, sequence: Sequence, delta: Delta) -> None:
        sequence.finish_reason = delta.finish_reason
        self.timings.ended(sequence, self._now)
        self._send(sequence, delta)
        job = self._job_of[sequence.id]
        job.live.remove(sequence)
        job.preemptions += sequence.preemptions
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        if sequence.matcher is not None:
            sequence.matcher.close()
            del self._matching[sequence.id]
            self._rematching.pop(sequence.id, None)
        del self._texts[sequence.id], self._job_of[sequence.id]

    def _emit(self) -> Iterator[StepOutput]:
        for job in self._ready.values():
            if job.opened and job.live:  # neither the first nor the last message, which is the most frequent case
                yield StepOutput(job.key, StreamMessage(tuple(job.deltas)), False)
                job.deltas = []
                continue
            done = not job.live
            stored = self.scheduler.prefixes.stored(job.lead) if done or not job.opened else None  # the first, the last
            yield StepOutput(job.key, build_message(job, stored), done, job.error if done else None)
            job.deltas = []
            if done:
                del self._jobs[job.key]
                self._held.discard(job.key)
        self._ready = {}


def _any_started(sequences: Iterable[Sequence]) -> bool:
    """Return whether any sequence of a request has been in the batch: its computation may be part of the response
    already.
    """
    return any(one.cached_tokens is not None or len(one.prompt_logprobs) > 1 for one in sequences)
