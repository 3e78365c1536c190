"""Fleet file as a whole: one model and the pools that serve it, and what each pool's engines follow from it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from ....replicas.engine.drafting.drafter_registry import find_drafter
from ....replicas.engine_config import EngineConfig, PrefixWire
from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import first_duplicate
from ...prefix_store.redis_source import MEMORY
from .engine_spec import ENGINE_NAMES
from .pool_spec import PoolSpec
from .prefix_cache_spec import PrefixCacheSpec
from .prefix_dtype import common_half_dtype
from .routing_spec import RoutingSpec
from .scaling_spec import ScalingSpec, SloSpec
from .service_spec import ListenSpec, QueueSpec, SecuritySpec, ServiceSpec, TenantSpec
from .value_types import Spec, Text, spec_error

__all__ = ["FleetSpec", "engine_config", "fleet_prefix_wire", "pool_model", "pool_prefix_wire"]


class FleetSpec(Spec):
    """Fleet: one model, served by pools of unequal replicas behind one endpoint."""

    model: Text
    """Model to serve: a folder (relative to this file), a Hugging Face id, or `demo`."""
    served_model_name: Text | None = None
    """Name by which clients call the model; by default the name of its folder."""
    pools: list[PoolSpec] = Field(min_length=1)
    """Pools, each of equal replicas."""
    slo: SloSpec | None = None
    routing: RoutingSpec = RoutingSpec.model_validate({})
    queue: QueueSpec = QueueSpec.model_validate({})
    scaling: ScalingSpec = ScalingSpec.model_validate({})
    tenants: dict[Text, TenantSpec] = Field(default_factory=dict)
    """Settings of tenants, by their names in the file of API keys."""
    prefix_cache: PrefixCacheSpec = PrefixCacheSpec.model_validate({})
    security: SecuritySpec = SecuritySpec.model_validate({})
    listen: ListenSpec = ListenSpec.model_validate({})
    service: ServiceSpec = ServiceSpec.model_validate({})

    FIXED: ClassVar[frozenset[str]] = frozenset({"model", "served_model_name", "security", "listen", "service"})
    """Entries that cannot change while the fleet runs."""

    @model_validator(mode="after")
    def _check(self) -> FleetSpec:
        double = first_duplicate(pool.name for pool in self.pools)
        if double is not None:
            last = max(number for number, pool in enumerate(self.pools) if pool.name == double)
            raise spec_error(f"{double!r} is the name of another pool already", "pools", last, "name")
        if all(pool.replicas.start == 0 for pool in self.pools):
            raise spec_error("0 is not accepted for every pool; expected one to start with", "pools", 0, "replicas")
        wire = self.prefix_cache.wire
        for number, pool in enumerate(self.pools):
            if self.prefix_cache.used and _keeps_int8(pool) and wire in ("float16", "bfloat16"):
                raise spec_error(
                    f"'int8' is not accepted: prefixes are stored in {wire}; set prefix_cache.wire to auto or int8",
                    *("pools", number, "engine", "kv_dtype"),
                )
            try:
                find_drafter(engine_config(self, pool).drafter)
            except InvalidRequest as error:
                names = {config: name for name, config in ENGINE_NAMES.items()}
                name = names.get(str(error.param), str(error.param))
                raise spec_error(error.message.partition(": ")[2], "pools", number, "engine", name) from None
        return self

    def pool(self, name: str) -> PoolSpec | None:
        return next((pool for pool in self.pools if pool.name == name), None)


def engine_config(spec: FleetSpec, pool: PoolSpec) -> EngineConfig:
    """Return the configuration of a pool's engines. Raises InvalidRequest."""
    given = {ENGINE_NAMES.get(name, name): value for name, value in pool.engine if value is not None}
    return EngineConfig(
        device=pool.where,
        tensor_parallel=pool.tensor_parallel,
        pipeline_parallel=pool.pipeline_parallel,
        pipeline_layers=None if pool.pipeline_layers is None else tuple(pool.pipeline_layers),
        cpu_weights=pool.quantization.cpu_weights,
        reuse_prefixes=spec.prefix_cache.reuse,
        prefix_cache="memory" if spec.prefix_cache.store == MEMORY else "off",
        prefix_cache_bytes=spec.prefix_cache.memory,
        prefix_wire=pool_prefix_wire(spec, pool),
        prefix_after=spec.prefix_cache.after,
        prefix_any_numerics=spec.prefix_cache.any_numerics,
        reader_timeout_s=spec.service.reader_timeout_s,
        **given,
    )


def fleet_prefix_wire(spec: FleetSpec) -> tuple[PrefixWire | None, str]:
    """Return the dtype in which all of the fleet store KV, and the reason. None: each replica in its own dtype."""
    cache = spec.prefix_cache
    if cache.wire != "auto":
        return cache.wire, "as configured"
    if not cache.any_numerics or not cache.shared:
        return None, "no pool reads what another numerics class has computed"
    return common_half_dtype(pool for pool in spec.pools if pool.simulate is None and not _keeps_int8(pool))


def pool_prefix_wire(spec: FleetSpec, pool: PoolSpec) -> PrefixWire | None:
    """Return the dtype in which a pool stores KV.

    KV in int8 stays so: such pools share prefixes with each other, or with all under `wire: int8`.
    """
    return None if spec.prefix_cache.wire == "auto" and _keeps_int8(pool) else fleet_prefix_wire(spec)[0]


def _keeps_int8(pool: PoolSpec) -> bool:
    return pool.engine.kv_dtype == "int8"


def pool_model(spec: FleetSpec, pool: PoolSpec) -> str:
    """Return the checkpoint that a pool's replicas load."""
    return pool.quantization.model or spec.model
