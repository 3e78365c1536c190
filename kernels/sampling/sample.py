"""Sampling of tokens from logits on the device, with separate parameters for each row, without waiting for the host.

The rule is that of replicas/execution/sampler.py: temperature, min_p, top_k, top_p, in this order, then one draw by
the inverse distribution function over token ids, with the Philox number of (seed, choice, position). Here it is
computed in integers:

    key     (largest logit - logit) / temperature, both steps in fp32 as the CPU sampler takes them, cut to 2**-25
    weight  2**44 exp(-key), by a polynomial in integers: integer_arithmetic.weight_of

so that sums are exact in any order, and every GPU, however a row is split, samples the same token from the same logits.
Greedy rows give the same token as the CPU sampler, the lowest id of equal logits. Sampled rows differ from it only

- where the random number falls within about 2**-23 of the border of two tokens, which is the precision of borders in
the CPU's fp32 softmax, or top_p or min_p as close to the border of what is kept; parameters are fp32 here, fp64 there;
- where tokens of equal probability straddle the last place that top_k or top_p keeps: here the lowest ids stay, while
the CPU sampler keeps as many, but torch.topk decides which; and it treats as equal what fp32 cannot distinguish; - in
tokens less likely than the best one by 2**44 and more, together at most 2**-26 of it for 2**18 tokens: they are never
sampled here.

A row with a NaN, with an infinite largest logit, or with no logit above minus infinity gets the id 0, which is a valid
id, and the log-probability NaN, which no other row has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..launch.compiled_launch import cached
from ..launch.variant import Config, Variant
from . import sample_kernels

LIMIT = 2**18  # most token ids: the weights of so many tokens add up to less than 2**63
_PLANES, _STATES = 8 * 1024, 5 * 4
_ASM = isinstance(sample_kernels.tally, triton.JITFunction)  # Triton's interpreter does not support PTX


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, as contiguous tensors [R] on the device of the logits.

    temperature     fp32; 0 is greedy
    top_k           int32; 0 and below keep all tokens
    top_p           fp32 in (0, 1]; 1 keeps all tokens
    min_p           fp32 in [0, 1]
    seed, position  int64
    choice          int32: index of the choice within its request; 0 if it has only one

    Raises ValueError for other dtypes or shapes.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor

    def __post_init__(self) -> None:
        wanted = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32, torch.int64)
        for name, dtype in zip(self.__slots__, wanted, strict=True):
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != self.temperature.shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not accepted; expected contiguous {dtype} [R]"
                )


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Penalties of R rows, as contiguous tensors [R] on the device of the logits.

    place                int64: index of the row of the history that belongs to the sequence
    repetition           fp32; 1 is none
    presence, frequency  fp32; 0 is none

    Raises ValueError for other dtypes or shapes.
    """

    place: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    def __post_init__(self) -> None:
        for name, dtype in zip(self.__slots__, (torch.int64, *[torch.float32] * 3), strict=True):
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != self.place.shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not accepted; expected contiguous {dtype} [R]"
                )


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """Division of a row of logits among `chunks` programs, each of which processes its chunk in tiles."""

    vocabulary: int
    chunk: int
    tile: int

    @classmethod
    def of(cls, vocabulary: int, config: Config) -> VocabularySplit:
        """Return the split that a config makes: its CHUNK and TILE are numbers of tokens, and powers of two.

        Raises ValueError for sizes that would count a token twice, and for an unsupported vocabulary.
        """
        chunk, tile = config["CHUNK"], config["TILE"]
        if not 1 <= vocabulary <= LIMIT:
            raise ValueError(f"vocabulary: {vocabulary} is not accepted; expected 1 to {LIMIT} tokens")
        if chunk % tile or tile < 32 * config.num_warps:
            raise ValueError(
                f"TILE: {tile} is not accepted; expected {32 * config.num_warps} or more, a divisor of CHUNK ({chunk})"
            )
        return cls(vocabulary, chunk, tile)

    @property
    def chunks(self) -> int:
        return -(-self.vocabulary // self.chunk)

    @property
    def splits(self) -> int:
        return 1 << (self.chunks - 1).bit_length()


_HISTORY = {torch.int16: "*i16", torch.int32: "*i32"}
_TYPES = {
    "history": "*i16", "places": "*i64", "repetitions": "*fp32", "presences": "*fp32", "frequencies": "*fp32",
    "out": "*fp32",
    "logits": "*fp32", "own": "*fp32", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32",
    "min_ps": "*fp32", "seeds": "*i64", "choices": "*i32", "positions": "*i64", "tops": "*fp32", "ids": "*i32",
    "sums": "*fp32", "own_tops": "*fp32", "own_sums": "*fp32", "states": "*i64", "planes": "*i64", "masses": "*i64",
    "equals": "*i32", "limits": "*i64", "tokens": "*i64", "logprobs": "*fp32", "V": "i32", "S": "i32",
}  # fmt: skip


@cached
def _variant(name: str, cut: VocabularySplit, config: Config, **constants: int | bool) -> Variant:
    function = getattr(sample_kernels, name)
    types = tuple((argument, _TYPES[argument]) for argument in function.arg_names if argument in _TYPES)
    scratch = ("logits", "own", "tops", "ids", "sums", "own_tops", "own_sums", "states", "planes", "masses", "equals")
    aligned = (*scratch, "V") if cut.vocabulary % 16 == 0 else scratch
    names = {argument for argument, _ in types}
    if name != "survey":
        constants["SPLITS"] = cut.splits
    label = f"sample_{name}_{constants['STEP']}" if name == "tally" else f"sample_{name}"
    return Variant(
        label, function, types, tuple(constants.items()), config, tuple(each for each in aligned if each in names)
    )


@cached
def penalty_variant(vocabulary: int, config: Config, history: torch.dtype) -> Variant:
    """Return the compiled variant of the kernel that applies penalties to logits."""
    cut = VocabularySplit.of(vocabulary, config)
    half = Config.of(config.num_warps, CHUNK=cut.chunk, TILE=max(32 * config.num_warps, cut.tile // 2))
    kernel = sample_kernels.penalise
    types = tuple((name, _TYPES[name]) for name in kernel.arg_names if name in _TYPES)
    types = tuple((name, _HISTORY[history] if name == "history" else kind) for name, kind in types)
    aligned = ("logits", "history", "out", "V") if cut.vocabulary % 16 == 0 else ("logits", "history", "out")
    return Variant("sample_penalise", kernel, types, (("COUNT", torch.iinfo(history).max),), half, aligned)


def penalize_logits(logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows, config: Config) -> torch.Tensor:
    """Return contiguous logits fp32 [R, V] with penalties applied, bit for bit as in replicas/execution/sampler.py.

    history  int16 or int32 [H, V], contiguous: how often a token is in a sequence's output, minus 2**15 or 2**31 if it
             is in the prompt
    """
    out = torch.empty_like(logits)
    variant = penalty_variant(logits.shape[1], config, history.dtype)
    if len(logits):
        grid = (logits.shape[0], VocabularySplit.of(logits.shape[1], config).chunks)
        variant.launch(
            grid, logits, history, rows.place, rows.repetition, rows.presence, rows.frequency, out, logits.shape[1]
        )  # fmt: skip
    return out


def sample_variants(
    vocabulary: int, config: Config, *, top_k: bool, top_p: bool, asm: bool = True
) -> tuple[Variant, ...]:
    """Return the compiled variants that `sample` launches, in order, when it gets no `own` logits."""
    cut = VocabularySplit.of(vocabulary, config)
    # `draw` holds a tile twice, as weights and as their sums.
    half = Config.of(config.num_warps, CHUNK=cut.chunk, TILE=max(32 * config.num_warps, cut.tile // 2))
    steps = (0,) * (top_k or top_p) + (1, 2) * top_k + (3, 4) * top_p
    return (
        _variant("survey", cut, config),
        *(_variant("tally", cut, config, STEP=step, ASM=asm) for step in steps),
        _variant("weigh", cut, config, TOP_K=top_k, TOP_P=top_p),
        _variant("draw", cut, half),
    )


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    config: Config,
    *,
    own: torch.Tensor | None = None,
    top_k: bool = True,
    top_p: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 [R] and log-probabilities fp32 [R] of one sampled token per row of contiguous logits fp32 [R,
    V].

    own           the model's own logits, where `logits` are these after bias, penalties or a grammar's mask:
                  log-probabilities are computed from them, and a row where they are not finite gets NaN as well
    top_k, top_p  False if no row asks for the filter; its launches are then left out
    """
    num_rows, vocabulary = logits.shape
    cut, device = VocabularySplit.of(vocabulary, config), logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return tokens, logprobs
    survey, *tallies, weigh, draw = sample_variants(vocabulary, config, top_k=top_k, top_p=top_p, asm=_ASM)
    grid = (num_rows, cut.chunks)

    def scratch(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    def surveyed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kinds = (torch.float32, torch.int32, torch.float32)
        found = tuple(scratch(cut.chunks, dtype=kind) for kind in kinds)
        survey.launch(grid, values, *found, vocabulary, cut.chunks)
        return found[0], found[1], found[2]

    tops, ids, sums = surveyed(logits)
    own_tops, _, own_sums = (tops, ids, sums) if own is None else surveyed(own)
    masses, equals, limits = scratch(cut.chunks), scratch(cut.chunks, dtype=torch.int32), scratch(2)
    states = scratch(_STATES)
    planes = torch.zeros(num_rows, _PLANES, dtype=torch.int64, device=device) if tallies else states
    parameters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    for tally in tallies:
        tally.launch(grid, logits, *parameters, tops, states, planes, vocabulary, cut.chunks)
    weigh.launch(
        grid, logits, *parameters, tops, states, planes, masses, equals, limits, vocabulary, cut.chunks
    )  # fmt: skip
    draw.launch(
        (num_rows,), logits, logits if own is None else own, rows.temperature, rows.min_p, rows.seed, rows.choice,
        rows.position, tops, ids, own_tops, own_sums, masses, equals, limits, tokens, logprobs, vocabulary, cut.chunks,
    )  # fmt: skip
    return tokens, logprobs
