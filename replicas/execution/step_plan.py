"""Plan of one step as plain data: the scheduler writes it, the runner reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..grammar.process.grammar_process import Matcher
from ..sampling_params import SamplingParams
from ..types import Pooling, TokenLogprob

MAX_BIASED = 16  # most ids of a row whose logits a device changes, by a bias or to minus infinity
UNKNOWN_TOKEN = -1  # stands for a token that the step before this one samples; the runner fills it in


# What is made for each sequence in each step is a named tuple: frozen, and made in a fifth of a dataclass's time.


class SampleSpec(NamedTuple):
    """Specification of how to choose the token after a sequence's last one; the sampler keeps no state of its own.

    position       index of the token in the output, from 0; with seed and choice it fixes the random number
    suppressed     ids that must not be chosen (such as the end of sequence before min_tokens)
    prompt_ids, output_ids   history for the penalties; views of the sequence's own lists
    matcher        says which tokens may follow, if it knows by the time of sampling; None: there is no grammar
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    suppressed: tuple[int, ...]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    matcher: Matcher | None = None

    @property
    def plain(self) -> bool:
        """Whether a device can choose the token: there is no grammar, no list of allowed tokens and no bad words, and
        at most MAX_BIASED ids are suppressed or biased.
        """
        few = not self.biased or len(self.suppressed) + len(self.params.logit_bias) <= MAX_BIASED
        params = self.params
        return self.matcher is None and few and not params.allowed_token_ids and not params.bad_words

    @property
    def biased(self) -> bool:
        return bool(self.suppressed or self.params.logit_bias)


class PlanItem(NamedTuple):
    """One sequence's share of a step.

    token_ids       the new tokens, at positions start .. start + len(token_ids) - 1; the last may be UNKNOWN_TOKEN
    blocks          KV blocks that hold positions 0 .. start + len(token_ids) - 1
    sample          set when the step reaches the sequence's last token, or its last draft
    verified        how to choose, after the token before each draft, what the draft must be: one for each of the last
                    `token_ids` that are drafts
    prompt_targets  the prompt tokens whose log-probabilities are wanted: targets[i] follows token_ids[i]
    prompt_top      how many alternatives are wanted beside each of these log-probabilities
    pooling         if set, the hidden states of these tokens are wanted, as one vector
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: SampleSpec | None = None
    prompt_targets: tuple[int, ...] = ()
    prompt_top: int = 0
    pooling: Pooling | None = None
    verified: tuple[SampleSpec, ...] = ()

    @property
    def specs(self) -> tuple[SampleSpec, ...]:
        """The sampling specs of the item's rows, one for each row that is sampled."""
        return () if self.sample is None else (*self.verified, self.sample) if self.verified else (self.sample,)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step. Items with one token come first.

    swap_out, swap_in  KV blocks to be copied beside the step, as pairs (device block, host block). The step may
                       overwrite blocks of swap_out once they are copied; it does not read those of swap_in, the next
                       step does
    weights            version of the model's weights that the step is computed with
    """

    items: tuple[PlanItem, ...]
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    weights: int = 0

    @property
    def num_tokens(self) -> int:
        return sum([len(item.token_ids) for item in self.items])

    @property
    def specs(self) -> list[SampleSpec]:
        """The sampling specs of all rows that are sampled, in order."""
        if any(item.verified for item in self.items):
            return [spec for item in self.items for spec in item.specs]
        return [item.sample for item in self.items if item.sample is not None]

    @property
    def swaps(self) -> bool:
        return bool(self.swap_out or self.swap_in)


class ItemResult(NamedTuple):
    """Result of one plan item. `token` is None when no token was sampled: none was asked for, the sequence's matcher
    was not ready, or the logits were not finite (`fault` says so).

    `accepted`: drafts that are right, each the token that was chosen in its place; `token` follows them.
    `pooled`: fp32 [hidden], the sum over the item's tokens (mean) or the last one's state (last).
    """

    token: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    fault: str | None = None
    pooled: tuple[float, ...] = ()
    accepted: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: one per item of the plan, in its order."""

    items: tuple[ItemResult, ...]
