"""Definitions of simulated fleets."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...replicas.errors import InvalidRequest
from ...replicas.simulated.roofline_rates import roofline_rates
from ...replicas.simulated.simulated_device import SimulatedDevice, SimulatedModel, find_model_shape, find_table_device
from ...replicas.types import ModelInfo, ReplicaProfile

__all__ = ["FLEETS", "SimulatedReplica", "find_model_shape", "simulated_fleet"]

CHUNK_S = 0.15  # maximum seconds of prefill in a step, which decodes beside it have to wait
_CHUNKS = (64, 2048)  # bounds of the tokens of a step
_RUNNING = 256  # maximum sequences of a step; with fewer, a fast card would wait for sequences to end
_MAX_REPLICAS = 100_000
_MODEL = ModelInfo("", "", 32_000, 32_768, (), "", "")

_EIGHT = ("P40", "T4", "V100-PCIE-16GB", "A10", "L4", "RTX 4090", "A100-SXM4-80GB", "H100 80GB HBM3")
FLEETS = {
    "equal": "4*A10",
    "mixed": "P40+T4+A10+H100 80GB HBM3",
    "classes": "+".join(f"16*{name}" for name in _EIGHT),
    "thousand": "250*P40+200*T4+100*V100-PCIE-16GB+150*A10+150*L4+80*RTX 4090+50*A100-SXM4-80GB+20*H100 80GB HBM3",
}


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """A replica to simulate.

    published  device as the replica's profile states it
    true       device as it really is, which no router knows
    """

    name: str
    published: SimulatedDevice
    true: SimulatedDevice
    max_batch_tokens: int
    max_running: int

    def profile(self, replica_id: str = "", pool: str = "") -> ReplicaProfile:
        """Return the profile that the replica publishes, which states its published speed and not its true one."""
        rates, gpu = roofline_rates(self.published, self.max_batch_tokens), self.published.device
        return ReplicaProfile(
            replica_id, _MODEL, "simulated", gpu.name, str(gpu.capability), "simulated", "", rates.prefill_tokens_per_s,
            rates.decode_s[0], self.published.num_blocks, self.max_batch_tokens, {}, rates.decode_s, rates.context_s,
            self.max_running, pool,
        )  # fmt: skip


def simulated_fleet(text: str, model: SimulatedModel, seed: int, *, hidden: float = 0.3) -> list[SimulatedReplica]:
    """Return the replicas of a fleet such as `4*A10`, `P40+T4+H100`, or a name in FLEETS. Raises InvalidRequest.

    hidden  largest share by which each deviates from its profile
    """
    rng = random.Random(f"fleet {seed}")
    return [
        SimulatedReplica(f"{name} {number}", published, published.hidden(rng, hidden), *_limits(published))
        for number, (name, published) in enumerate(_parse_fleet(FLEETS.get(text, text), model))
    ]


def _parse_fleet(text: str, model: SimulatedModel) -> Iterator[tuple[str, SimulatedDevice]]:
    total = 0
    for part in text.split("+"):
        found = re.fullmatch(r"\s*(?:(\d+)\s*[*x×]\s*)?(\S.*?)\s*", part)
        if found is None:
            raise InvalidRequest(f"fleet: {text!r} is not accepted; expected replicas such as P40+2*T4", param="fleet")
        total += (count := int(found[1] or 1))
        if count < 1 or total > _MAX_REPLICAS:
            raise InvalidRequest(f"fleet: {total} replicas; expected 1 to {_MAX_REPLICAS}", param="fleet")
        published = SimulatedDevice(find_table_device(found[2]), model)
        published.num_blocks  # noqa: B018  # raises unless the model fits
        for _ in range(count):
            yield found[2], published


def _limits(device: SimulatedDevice) -> tuple[int, int]:
    """Return the maximum tokens and sequences of a step; a slow card computes a prompt in smaller pieces."""
    tokens = min(max(int(device.prefill_tokens_per_s * CHUNK_S) // 16 * 16, _CHUNKS[0]), _CHUNKS[1])
    return tokens, min(tokens, _RUNNING)
