"""Pools of equal replicas in a fleet file: how many, on which devices, real or simulated, in how many processes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import short_repr
from .accepted_capabilities import accepted_capabilities
from .engine_spec import EngineSpec, QuantizationSpec
from .value_types import (
    DEVICE,
    MAX_REPLICAS,
    MIN_QUANTITY,
    Capability,
    Count,
    FilePath,
    LabelName,
    LabelValue,
    Name,
    NotNegative,
    Parallel,
    Positive,
    Seconds,
    Spec,
    Text,
    spec_error,
)

RESERVED = ("ingress",)  # another deployment of the same application has this name


def _is_number_of_replicas(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPLICAS


class ReplicaRange(Spec):
    """Number of replicas: a plain number such as `replicas: 2` means always two.

    Entries min, max and start allow scaling.
    """

    min: int = Field(1, ge=0, le=MAX_REPLICAS)
    """Minimum number of replicas, whatever the load; 0: none while there are no requests."""
    max: int = Field(1, ge=1, le=MAX_REPLICAS)
    """Maximum number of replicas."""
    start: int = Field(1, ge=0, le=MAX_REPLICAS)
    """Number of replicas at the start; by default `min`, but at least 1."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value, "start": value}
        if isinstance(value, ReplicaRange):
            return value
        if not isinstance(value, dict):
            raise spec_error(
                f"{short_repr(value)} is not accepted; expected a whole number, or entries such as min: 1, max: 4"
            )
        low = value.get("min", 1)
        start = value.get("start", max(1, low) if _is_number_of_replicas(low) else 1)
        high = max(low, start, 1) if _is_number_of_replicas(low) and _is_number_of_replicas(start) else 1
        return {"max": high, **value, "start": start, "min": low}

    @model_validator(mode="after")
    def _check(self) -> ReplicaRange:
        if self.max < self.min:
            raise spec_error(f"{self.max} is not accepted; expected at least min ({self.min})", "max")
        if not self.min <= self.start <= self.max:
            raise spec_error(f"{self.start} is not accepted; expected min to max ({self.min} to {self.max})", "start")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        whole = {"type": "integer", "minimum": 1, "maximum": MAX_REPLICAS}
        return {"anyOf": [whole, {key: value for key, value in schema.items() if key != "default"}]}


class HiddenSpec(Spec):
    """Deviation of a simulated GPU from its profile, to imitate hardware that routers know imprecisely."""

    share: float = Field(0.3, ge=0, lt=1)
    """Largest deviation as a share: bandwidth and arithmetic each deviate by up to this much."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    """Seed of the deviation, which makes it the same at each start and for each replica; by default every replica
    deviates at random."""


class AttainedSpec(Spec):
    """Shares of the roofline that the kernels of a simulated GPU reach."""

    bandwidth: float = Field(0.65, ge=MIN_QUANTITY, le=2)
    """Share of the memory bandwidth that kernels reach."""
    arithmetic: float = Field(0.5, ge=MIN_QUANTITY, le=2)
    """Share of the peak arithmetic rate that matrix multiplications reach."""
    step_s: float = Field(0.0005, gt=0, le=10)
    """Seconds that each step costs in addition to its kernels."""
    measured: str = Field("", max_length=1024)
    """File that the shares are fitted to, if they are."""


class BundleSpec(Spec):
    """Resources that one process of a replica reserves."""

    cpus: Positive = 1.0
    """Number of Ray's logical CPUs; the process computes with as many threads unless the engine's `threads` says
    otherwise."""
    resources: dict[Text, Positive] = Field(default_factory=dict)
    """Custom Ray resources that the process reserves, by name."""
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """Labels that the node of the process must have, in addition to the pool's."""


class PoolSpec(Spec):
    """Pool of equal replicas: where they run, and with which limits."""

    name: Name
    """Name of the pool in metrics and commands."""
    replicas: ReplicaRange = Field(default_factory=lambda: ReplicaRange.model_validate({}))
    device: str | None = Field(None, pattern=DEVICE)
    """cpu; cuda: one GPU, assigned by Ray, for each process of a replica; cuda:1: GPU number 1 of the machine and, for
    a replica of several processes, the ones after it; cuda,cpu: one device for each pipeline stage. By default cuda if
    an accelerator or a compute capability is requested, else cpu."""
    accelerator: LabelValue | None = None
    """Only use nodes whose label ray.io/accelerator-type matches: T4, A10, in(A10, A10G)."""
    compute_capability: Capability | None = None
    """Only use nodes whose label motley/compute-capability matches: 7.5 for exactly this, ">=8.0" for at least this."""
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """Only use nodes with these labels."""
    resources: dict[Text, Positive] = Field(default_factory=dict)
    """Custom Ray resources that each replica reserves, by name."""
    cpus: NotNegative | None = None
    """Number of Ray's logical CPUs that each replica reserves; by default 1 for each of its processes."""
    simulate: Text | None = None
    """Name of a GPU to simulate: replicas compute nothing, and take the time that the roofline model predicts for
    it."""
    simulate_model: Text | None = None
    """Model whose times a simulated GPU takes: qwen2.5-7b, llama-3-8b, ...; by default the model that is served."""
    measured: FilePath | None = None
    """JSON file with measurements of the real GPU that the simulated one imitates: of `motley bench gpu` (streams.json)
    or `bench engine`, or prefill_tokens_per_s, decode_s and context_s as in a replica's profile."""
    attained: AttainedSpec | None = None
    """Shares of the roofline that a simulated GPU's kernels reach; by default fitted to `measured`, or assumed."""
    hidden: HiddenSpec = HiddenSpec.model_validate({})
    """Deviation of a simulated GPU from its profile."""
    tensor_parallel: Parallel = 1
    """Number of processes that share each layer; in a GPU pool each has a GPU of its own."""
    pipeline_parallel: Parallel = 1
    """Number of pipeline stages, each of which holds some of the layers. Each stage has `tensor_parallel` processes."""
    pipeline_layers: list[Count] | None = None
    """Number of layers of each stage; by default chosen so that the slowest stage takes the least time."""
    bundles: list[BundleSpec] | None = None
    """Resources of each process of a divided replica, stage by stage and rank by rank, as a placement group of Ray: the
    replica has the first bundle, and each other process is an actor in its own; in a GPU pool each has a GPU. By
    default the processes are subprocesses of the replica, which reserves resources for all."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] | None = None
    """Strategy by which Ray places the bundles: by default STRICT_PACK, on one node. With the other strategies they may
    be on several nodes; then they communicate over TCP, which is not encrypted, and share no prefixes."""
    quantization: QuantizationSpec = QuantizationSpec.model_validate({})
    engine: EngineSpec = EngineSpec.model_validate({})
    cost_per_hour: NotNegative = 0.0
    """Price of one replica per hour, in any currency."""
    cold_start_s: Seconds = 60.0
    """Expected seconds from a new target until the new replica serves."""

    LIVE: ClassVar[frozenset[str]] = frozenset({"replicas", "cost_per_hour", "cold_start_s"})
    """Entries that replicas do not depend on, and so change without a restart."""

    @property
    def where(self) -> str:
        """Device of the pool, given or by default."""
        return self.device or ("cuda" if self.accelerator or self.compute_capability else "cpu")

    @property
    def processes(self) -> int:
        """Number of processes of each replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def gpus(self) -> list[bool]:
        """Whether each process of a replica has a GPU, stage by stage."""
        stages = self.where.split(",")
        stages = stages if len(stages) > 1 else stages * self.pipeline_parallel
        return [stage != "cpu" for stage in stages for _ in range(self.tensor_parallel)]

    @property
    def spread(self) -> bool:
        """Whether a replica may extend over several nodes."""
        return self.strategy not in (None, "STRICT_PACK")

    @property
    def booked_cpus(self) -> float:
        """Number of Ray's logical CPUs that each replica reserves with all its processes."""
        if self.bundles is not None:
            return sum(bundle.cpus for bundle in self.bundles)
        return float(self.processes) if self.cpus is None else self.cpus

    @model_validator(mode="after")
    def _check(self) -> PoolSpec:
        for number, what, name in (
            (self.tensor_parallel, "ranks", "tensor_parallel"),
            (self.pipeline_parallel, "stages", "pipeline_parallel"),
        ):
            if number > 1 and self.simulate is not None:
                raise spec_error(f"{number} is not accepted; simulated GPUs have no {what}: expected 1", name)
        if self.pipeline_layers is not None and len(self.pipeline_layers) != self.pipeline_parallel:
            raise spec_error(
                f"{self.pipeline_layers} is not accepted; expected a number for each of {self.pipeline_parallel} "
                "stages",
                "pipeline_layers",
            )
        if self.where.count(",") not in (0, self.pipeline_parallel - 1):
            expected = f"expected one, or one for each of {self.pipeline_parallel} stages"
            raise spec_error(f"{self.where!r} is not accepted; {expected}", "device")
        self._check_bundles()
        if self.name in RESERVED:
            raise spec_error(f"{self.name!r} is not accepted; it is the name of another part of the service", "name")
        if self.simulate is None and self.simulate_model is not None:
            raise spec_error("it needs `simulate`, which names a GPU", "simulate_model")
        for name in ("measured", "attained"):
            if self.simulate is None and getattr(self, name) is not None:
                raise spec_error("it needs `simulate`, which names a GPU", name)
        if self.measured is not None and self.attained is not None:
            raise spec_error("it is fitted to `measured`: set one or the other", "attained")
        if self.simulate is None and self.hidden != HiddenSpec.model_validate({}):
            raise spec_error("it needs `simulate`, which names a GPU", "hidden")
        if self.simulate is not None and self.where != "cpu":
            at = next(each for each in ("device", "accelerator", "compute_capability") if getattr(self, each))
            raise spec_error("a simulated GPU is computed on a CPU: set one or the other", at)
        if not any(self.gpus) and (self.accelerator or self.compute_capability):
            raise spec_error("'cpu' is not accepted: the pool asks for a kind of GPU; expected cuda", "device")
        return self

    def _check_bundles(self) -> None:
        if self.bundles is None:
            if self.strategy is not None:
                raise spec_error("it needs `bundles`, and there are none", "strategy")
            return
        if self.processes == 1:
            message = "they are for divided replicas: expected `tensor_parallel` or `pipeline_parallel` above 1"
            raise spec_error(message, "bundles")
        if len(self.bundles) != self.processes:
            message = f"{len(self.bundles)} are not accepted; expected one for each of {self.processes} processes"
            raise spec_error(message, "bundles")
        for name, given in (("cpus", self.cpus is not None), ("resources", bool(self.resources))):
            if given:
                raise spec_error("it is not accepted beside `bundles`, each of which has its own", name)
        if ":" in self.where:
            raise spec_error(
                f"{self.where!r} is not accepted with `bundles`; expected cuda, which Ray assigns", "device"
            )

    @field_validator("compute_capability")
    @classmethod
    def _check_known(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                accepted_capabilities(value)
        except InvalidRequest as error:
            raise spec_error(error.message) from None
        return value
