"""State of one choice of a request while the engine computes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..execution.step_plan import UNKNOWN_TOKEN, PlanItem, SampleSpec
from ..grammar.process.grammar_process import Matcher
from ..kv.blocks import Allocation, extend_hashes
from ..kv.host_blocks import HostKvCopy
from ..types import BLOCK_TOKENS, FinishReason, Pooling, Request, TokenLogprob


class SequenceState(enum.Enum):
    WAITING = "waiting"
    WAITING_KV = "waiting for KV"  # for the KV of its prompt, which a prefix store sends
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt of a request, the output so far, and how much of both has been computed.

        |<------------ prompt ------------>|<---- output ---->|...
        0   num_computed  ->  num_launched  ->  catch up with  num_tokens + ahead

    The last token is computed by the step that samples the next one. A step may be launched before the step before it
    is known to have ended: its tokens count in `num_launched` from then on, and in `num_computed` once its result is
    here.

    rank                 sequences of a lower rank run first
    ahead                steps in flight that sample a token of this sequence: each such token has a position, and no id
                         yet
    arrived_s            when its request came
    admitted_s           when it first had a place in a batch; None: it has had none
    first_token_s        when its first token here was known; None: it has none
    is_probe             whether it only shows that the engine works, and counts in no metric
    limit                num_tokens at which the sequence ends by length
    eos_ids              token ids that end it, unless the request ignores them
    leader               sequence with the same prompt: this one waits until the leader has computed the prompt, and
                         then finds the prompt's KV in the prefix cache
    matcher              state of its grammar; a step during which the matcher is not ready samples no token
    matcher_wait_tokens  tokens for which, after a step in vain like that, the sequence waits for its matcher before it
                         joins a step
    held                 whether its client reads too slowly, so that nothing is computed for it
    host_copy            KV of its first tokens in host memory, while it waits
    store_lookup_done    whether a prefix store was already asked for its prompt, or it is not worth asking
    values               keys of the values that its prompt fills in the prefix store
    absent               index of the first of these values that was fetched and not there; None: no fetch missed
    coming               tokens whose KV came or comes from the prefix store, while it is WAITING_KV
    fetch_s              seconds that it waited for KV from the prefix store
    preemptions          how often it lost its place in the batch
    displaced            how often it was preempted for a request of a higher priority
    weights              version of the model's weights that it is computed with
    outdated             whether newer weights exist: its KV is then not shared with other sequences, in either
                         direction

    next_step_depends_on_token: whether a token in flight decides what the next step does with the sequence. Then no
    step is planned until the token's id is known.
    """

    id: int
    request: Request
    choice: int
    arrival: int
    limit: int
    eos_ids: tuple[int, ...]
    deadline: float | None = None  # monotonic seconds
    leader: Sequence | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_launched: int = 0
    ahead: int = 0
    next_step_depends_on_token: bool = False
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    allocation: Allocation | None = None
    hashes: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    wants_prompt_logprobs: bool = False
    pooled: list[float] = field(default_factory=list)
    matcher: Matcher | None = None
    matcher_wait_tokens: int = 0
    held: bool = False
    host_copy: HostKvCopy | None = None
    store_lookup_done: bool = False
    values: tuple[bytes, ...] = ()
    absent: int | None = None
    coming: int = 0
    fetch_s: float = 0.0
    preemptions: int = 0
    displaced: int = 0
    weights: int = 0
    outdated: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrived_s: float = 0.0  # these three in seconds of the engine's clock
    admitted_s: float | None = None
    first_token_s: float | None = None
    is_probe: bool = False
    num_prompt: int = field(init=False)
    rank: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)
        self.rank = (-self.request.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Number of tokens that no launched step computes yet, and that must be computed before the next one can be
        sampled.
        """
        return self.num_prompt + len(self.output_ids) + self.ahead - self.num_launched

    @property
    def remaining_to_compute(self) -> int:
        """Number of `remaining` tokens, less those whose KV is in host memory, or comes from a prefix store."""
        if self.state is SequenceState.WAITING_KV:
            return self.remaining - self.coming
        return self.remaining - (self.host_copy.num_tokens if self.host_copy is not None else 0)

    @property
    def awaits_token(self) -> bool:
        """Whether no step can be planned before the token in flight is known, as it is the last or decides what
        follows.
        """
        ahead = self.ahead
        return ahead > 0 and (
            self.next_step_depends_on_token or self.num_prompt + len(self.output_ids) + ahead >= self.limit
        )

    def has_capacity(self, count: int) -> bool:
        """Return whether the allocated blocks hold the next `count` tokens."""
        assert self.allocation is not None
        return len(self.allocation.blocks) * BLOCK_TOKENS >= self.num_launched + count

    @property
    def blocked(self) -> bool:
        """Whether the sequence waits because its leader is computing their common prompt."""
        leader = self.leader
        if leader is None or leader.state is SequenceState.FINISHED:
            return False
        return leader.num_computed < self.num_prompt // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def paused(self) -> bool:
        """Whether the sequence is held, or waits for its matcher since a recent step found that not ready."""
        matcher = self.matcher
        return self.held or (matcher is not None and self.matcher_wait_tokens > 0 and matcher.pending)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the token ids at positions start .. stop - 1; UNKNOWN_TOKEN stands for a token that is in flight."""
        prompt, place = self.request.prompt_ids, start - self.num_prompt
        if place >= 0 and stop - start == 1:  # a decode
            return (self.output_ids[place] if place < len(self.output_ids) else UNKNOWN_TOKEN,)
        output = self.output_ids[max(place, 0) : max(stop - len(prompt), 0)]
        return (*prompt[start:stop], *output, *[UNKNOWN_TOKEN] * (stop - max(start, self.num_tokens)))

    @property
    def may_reuse(self) -> bool:
        """Whether the sequence may use KV that others computed: not if its request wants log-probabilities or hidden
        states of every prompt position, nor if its weights are outdated.
        """
        needs_logits = self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt
        return not self.outdated and not needs_logits and self.request.pooling is not Pooling.MEAN

    def reusable_hashes(self) -> list[bytes]:
        """Return the hashes of the blocks that a prefix lookup may use; at least one token is always left to
        compute.
        """
        if not self.may_reuse:
            return []
        self.update_hashes()
        return self.hashes[: (self.num_tokens - 1) // BLOCK_TOKENS]

    def update_hashes(self) -> None:
        if len(self.hashes) < self.num_tokens // BLOCK_TOKENS:
            extend_hashes(self.hashes, self.request.cache_salt, self.tokens(0, self.num_tokens))

    @property
    def may_draft(self) -> bool:
        """Whether draft tokens may be tried: not with a grammar, which does not know what may follow a draft before it
        is accepted, and not for an embedding.
        """
        return self.matcher is None and self.request.pooling is None

    def item(self, count: int, drafts: tuple[int, ...] = ()) -> PlanItem:
        """Return the sequence's share of a step: its next `count` tokens, and the drafts that are tried after the last
        of these.
        """
        start, end = self.num_launched, self.num_launched + count
        pooling = self.request.pooling
        assert self.allocation is not None
        if not drafts and pooling is None and not self.wants_prompt_logprobs:  # nothing but tokens
            last = end == self.num_prompt + len(self.output_ids) + self.ahead
            spec = self.sample_spec() if last else None
            return PlanItem(self.id, start, self.tokens(start, end), self.allocation.table(end), spec)
        return PlanItem(
            sequence_id=self.id,
            start=start,
            token_ids=self.tokens(start, end) + drafts,
            blocks=self.allocation.table(end + len(drafts)),
            sample=self.sample_spec(drafts) if end == self.num_tokens + self.ahead and not pooling else None,
            prompt_targets=self._prompt_targets(start, end),
            prompt_top=self.request.sampling.prompt_logprobs or 0,
            pooling=pooling,
            verified=tuple([self.sample_spec(drafts[:count]) for count in range(len(drafts))]),
        )

    def _prompt_targets(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt tokens that follow positions start .. end - 1, while their log-probabilities are wanted; else
        empty.
        """
        if not self.wants_prompt_logprobs or len(self.prompt_logprobs) >= self.num_prompt:
            return ()
        return self.tokens(start + 1, min(end + 1, self.num_prompt))

    def sample_spec(self, drafts: tuple[int, ...] = ()) -> SampleSpec:
        """Return how to choose the token after the last one, or after these draft tokens that follow the last one."""
        params = self.request.sampling
        assert params.seed is not None, "the ingress sets the seed of every request"
        position = len(self.output_ids) + self.ahead + len(drafts)
        held_back = position < params.min_tokens
        suppressed = (*self.eos_ids, *params.stop_token_ids) if held_back else ()
        if self.matcher is not None and params.ignore_eos:
            suppressed = (*suppressed, *self.eos_ids)  # the grammar would take an end-of-sequence token for the end
        if self.bad_words:
            suppressed = (*suppressed, *self._completing_bad_words(drafts))
        output = [*self.output_ids, *drafts] if drafts and params.penalised else self.output_ids
        prompt = self.request.prompt_ids
        return SampleSpec(params, params.seed, self.choice, position, suppressed, prompt, output, self.matcher)

    def _completing_bad_words(self, drafts: tuple[int, ...]) -> set[int]:
        """Ids of the tokens that would complete a bad word whose other tokens end the output with these drafts."""
        longest = max(map(len, self.bad_words))
        before = (*self.output_ids[-longest:], *drafts)
        return {word[-1] for word in self.bad_words if len(word) == 1 or before[1 - len(word) :] == word[:-1]}

    def pool(self, start: int, part: tuple[float, ...]) -> tuple[float, ...] | None:
        """Add the hidden states of tokens from position `start` on; return the embedding once all prompt tokens are in,
        else None.

        A preempted sequence begins again at 0.
        """
        mean = self.request.pooling is Pooling.MEAN
        if start == 0 or not mean:
            self.pooled = list(part)
        else:
            self.pooled = [total + new for total, new in zip(self.pooled, part, strict=True)]
        if self.num_computed < self.num_prompt:
            return None
        return tuple(value / self.num_prompt for value in self.pooled) if mean else tuple(self.pooled)

    @property
    def stop_id(self) -> int | None:
        """The last output token, if it is one of the request's stop ids; else None."""
        last = self.output_ids[-1] if self.output_ids else None
        return last if last in self.request.sampling.stop_token_ids else None

    def finish_after_last(self) -> FinishReason | None:
        """Return the reason for which the last output token ends the sequence, or None. Stop strings are checked in
        text_stream.py.
        """
        params = self.request.sampling
        output = self.output_ids
        if output and len(output) > params.min_tokens:
            last = output[-1]
            if last in params.stop_token_ids or (last in self.eos_ids and not params.ignore_eos):
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.limit else None
