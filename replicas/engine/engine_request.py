"""Requests as the engine keeps them, and the messages that are sent for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import MotleyError
from ..text.tokenizer.text_stream import TextStream
from ..types import Delta, FinishReason, PromptStoreStatus, RequestTimings, StreamMessage, TokenLogprob
from .sequence import Sequence


class StepOutput(NamedTuple):
    """Output of one step for one request. `done`: nothing follows. `error` is set only when done."""

    key: int
    message: StreamMessage
    done: bool
    error: MotleyError | None = None


@dataclass(slots=True)
class EngineRequest:
    """A request in the engine: its live sequences, and the output that is ready to be sent.

    lead         the sequence of the first choice
    opened       whether the first message was sent
    stored       state of the prompt in the prefix store, as it was sent last
    preemptions  how often those of its sequences that have ended lost their places
    """

    key: int
    lead: Sequence
    live: list[Sequence]
    deltas: list[Delta] = field(default_factory=list)
    opened: bool = False
    embedding: tuple[float, ...] | None = None
    error: MotleyError | None = None
    stored: PromptStoreStatus | None = None
    preemptions: int = 0


def replay_output(sequence: Sequence, text: TextStream | None) -> Delta | None:
    """Replay a resumed sequence's output; return its closing delta if the sequence had already ended when it was
    lost.
    """
    if not sequence.output_ids:
        return None
    if text is not None:
        text.replay(sequence.output_ids)
    reason = sequence.finish_after_last()
    if reason is FinishReason.STOP:
        return Delta(sequence.choice, finish_reason=reason, stop_reason=sequence.stop_id)
    if text is not None and text.stopped is not None:
        return Delta(sequence.choice, finish_reason=FinishReason.STOP, stop_reason=text.stopped)
    return Delta(sequence.choice, finish_reason=reason) if reason else None


def add_prompt_logprobs(sequence: Sequence, start: int, found: tuple[TokenLogprob, ...]) -> None:
    """Append the prompt's log-probabilities that are new: a preempted sequence computes some of its prompt twice."""
    num_found = len(sequence.prompt_logprobs) - (start + 1)
    sequence.prompt_logprobs.extend(found[max(num_found, 0) :])


def build_message(job: EngineRequest, stored: PromptStoreStatus | None = None) -> StreamMessage:
    """Return the next message of a job. `stored`, the state of the prompt in the prefix store, is given for the first
    and the last message; the last repeats it only if it has changed.
    """
    first, job.opened = not job.opened, True
    if not first and stored is None:
        return StreamMessage(tuple(job.deltas), preemptions=job.preemptions)
    before, job.stored = job.stored, stored or job.stored
    if not first:
        news = stored if _has_news(stored, before) else None
        return StreamMessage(tuple(job.deltas), stored=news, preemptions=job.preemptions)
    return StreamMessage(
        tuple(job.deltas),
        cached_tokens=job.lead.cached_tokens or 0,
        prompt_logprobs=_prompt_logprobs(job.lead),
        embedding=job.embedding,
        stored=stored,
        weights=job.lead.weights,
        timings=_timings(job.lead),
        preemptions=0 if job.live else job.preemptions,  # the last message has all of them
    )


def _timings(lead: Sequence) -> RequestTimings | None:
    if lead.admitted_s is None or lead.first_token_s is None:
        return None
    queue_s = max(0.0, lead.admitted_s - lead.arrived_s - lead.fetch_s)
    return RequestTimings(queue_s, lead.fetch_s, lead.first_token_s - lead.admitted_s)


def _prompt_logprobs(lead: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """Return the prompt's log-probabilities; None unless they are wanted and the whole prompt has been computed."""
    computed = len(lead.prompt_logprobs) == lead.num_prompt
    return tuple(lead.prompt_logprobs) if lead.wants_prompt_logprobs and computed else None


def _has_news(stored: PromptStoreStatus | None, before: PromptStoreStatus | None) -> bool:
    if stored is None or before is None:
        return stored is not None
    return (stored.tokens, stored.absent) != (before.tokens, before.absent)
