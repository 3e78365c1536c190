"""Rotary position embeddings: their kinds, frequencies and tables."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..checkpoint.files.json_fields import JsonFields
from ..short_repr import short_repr

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")

# keys that each kind reads beside the theta and the name of the kind
_KEYS_OF_KIND: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
            *("beta_fast", "beta_slow", "truncate"),
        }
    ),
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})
_ALL_KEYS = frozenset().union(*_KEYS_OF_KIND.values())
_MAX_POSITIONS = 1 << 24
DEFAULT_THETA = 10_000.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rope with all of its numbers settled.

    original_length   positions that the model saw before its context was extended
    attention_factor  factor for cosine and sine (yarn)
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def read_rope(config: JsonFields, max_positions: int) -> RopeConfig:
    """Read the rope settings of config.json as transformers 5 writes them (`rope_parameters`) or 4 (`rope_scaling`,
    `rope_theta`).

    Keys that only other kinds of rope read are ignored, as in transformers, and the log says so.
    """
    section = _section(config)
    kind = section.choice("rope_type" if "rope_type" in section else "type", ROPE_KINDS, default="default")
    section.refuse_unknown(_ALL_KEYS | _COMMON_KEYS)
    if unread := [key for key in section.raw if key in section and key in _ALL_KEYS - _KEYS_OF_KIND[kind]]:
        log.warning("%s: rope of kind %s does not read %s", section.file, kind, ", ".join(unread))
    for fields in (section, config):
        fields.number("partial_rotary_factor", 1.0, 1.0, default=1.0)
    theta = (section if "rope_theta" in section else config).number(
        "rope_theta", 1.0 + 1e-6, 1e12, default=DEFAULT_THETA
    )
    if kind == "default":
        return RopeConfig(theta=theta, original_length=max_positions)
    length_key = "original_max_position_embeddings"
    original = (config if length_key in config else section).integer(
        length_key, 1, _MAX_POSITIONS, default=max_positions
    )
    implied = max_positions / original if kind == "yarn" else None
    factor = section.number("factor", 1.0, 1e6, default=implied)
    if kind == "linear":
        return RopeConfig("linear", theta, factor, max_positions)
    if kind == "llama3":
        low = section.number("low_freq_factor", 1e-3, 1e6)
        high = section.number("high_freq_factor", low * (1 + 1e-9), 1e6)
        return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_length=original,
        attention_factor=_yarn_attention_factor(section, factor),
        beta_fast=section.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=section.number("beta_slow", 1e-3, 1e6, default=1.0),
        truncate=section.boolean("truncate", True),
    )


def _section(config: JsonFields) -> JsonFields:
    """Return the object with the settings: transformers 5 uses `rope_scaling`, whole, in place of `rope_parameters`.

    Model cards tell users to add the first; transformers 5 writes the second. Raises CheckpointError, naming both, if
    the second says something that would be lost, above all the theta.
    """
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    if scaling is None or not scaling.raw:
        return parameters or JsonFields({}, config.file)
    lost = _stated(parameters) if parameters else {}
    for key in ("rope_type", "type"):  # "default" means no settings, so that scaling can be added to it
        if lost.get(key) == "default":
            del lost[key]
    taken = {"rope_theta": config.raw.get("rope_theta") or DEFAULT_THETA, **_stated(scaling)}
    taken |= {name: taken[other] for name, other in (("type", "rope_type"), ("rope_type", "type")) if other in taken}
    for key, value in lost.items():
        if key not in taken or value != taken[key]:
            there = f"which has {short_repr(taken[key])}" if key in taken else "which does not say it"
            raise config.error_at(
                f"rope_parameters.{key}", value, f"the same as in rope_scaling, {there} and counts: keep one of the two"
            )
    return scaling


def _stated(section: JsonFields) -> dict[str, Any]:
    return {key: value for key, value in section.raw.items() if value is not None}


def _yarn_attention_factor(section: JsonFields, factor: float) -> float:
    """Return the attention factor: as given, or 0.1 ln(factor) + 1 (YaRN, arXiv 2309.00071, equation 22), or the ratio
    of two such values.
    """
    if "attention_factor" in section:
        return section.number("attention_factor", 1e-3, 1e3)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    numerator = section.number("mscale", 0.0, 1e3, default=0.0)
    denominator = section.number("mscale_all_dim", 0.0, 1e3, default=0.0)
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return radians per position, fp32 [head_dim / 2], highest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        unscaled = _yarn_unscaled_share(rope, head_dim)
        return plain / rope.factor * (1.0 - unscaled) + plain * unscaled
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Return llama3's frequencies: long waves are slowed by the factor, short ones kept, and those between blended by
    their wavelength.
    """
    turns = rope.original_length * plain / (2 * math.pi)  # full turns within the original context
    unscaled = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    unscaled = unscaled.clamp(0.0, 1.0)
    return plain / rope.factor * (1.0 - unscaled) + plain * unscaled


def _yarn_unscaled_share(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return how much of each plain frequency stays: 1 where it turns more than beta_fast times, 0 below beta_slow."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 1e-3
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1.0 - ramp.clamp(0.0, 1.0)


class RotaryTable:
    """Table of cosine and sine by position, fp32 [length, head_dim / 2].

    It grows in pieces of one size, so that a position's values never depend on the table's length.
    """

    PIECE = 4096

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = rotary_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor
        self._cos = torch.empty(0, head_dim // 2, device=device)
        self._sin = torch.empty(0, head_dim // 2, device=device)

    def reserve(self, length: int) -> None:
        """Extend the table to position length - 1."""
        length_now = self._cos.shape[0]
        if length <= length_now:
            return
        starts = range(length_now, length, self.PIECE)
        angles = [self._angles(start) for start in starts]
        self._cos = torch.cat([self._cos, *(a.cos() * self._attention_factor for a in angles)])
        self._sin = torch.cat([self._sin, *(a.sin() * self._attention_factor for a in angles)])

    def at(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [T, head_dim / 2] for positions int64 [T], all below `length`."""
        self.reserve(length)
        return self._cos[positions], self._sin[positions]

    def _angles(self, start: int) -> torch.Tensor:
        device = self._frequencies.device
        positions = torch.arange(start, start + self.PIECE, device=device, dtype=torch.float32)
        return torch.outer(positions, self._frequencies)
