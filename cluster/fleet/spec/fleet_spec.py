"""Types of a fleet file: the model, pools of equal replicas, objectives and settings, also stored as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ....replicas.byte_sizes import MAX_SIZE, parse_size
from ....replicas.engine_config import MAX_COUNT, MAX_PARALLEL, MAX_SECONDS, MAX_THREADS, EngineConfig, PrefixWire
from ....replicas.errors import InvalidRequest
from ....replicas.short_repr import first_duplicate, short_repr
from ...prefix_store.redis_source import EMBEDDED, MEMORY, OFF, check_store
from ...service_errors import ConfigurationError
from .accepted_capabilities import CAPABILITY_PATTERN, accepted_capabilities
from .prefix_dtype import common_half_dtype

__all__ = [
    "PATTERNS",
    "AttainedSpec",
    "BundleSpec",
    "EngineSpec",
    "FleetSpec",
    "HiddenSpec",
    "ListenSpec",
    "PoolSpec",
    "PrefixCacheSpec",
    "QuantizationSpec",
    "QueueSpec",
    "ReplicaRange",
    "ScalingSpec",
    "SecuritySpec",
    "ServiceSpec",
    "SloSpec",
    "TenantSpec",
]

MAX_REPLICAS = 10_000
MAX_OBJECTIVE_S = 3600.0  # a longer objective would not be one
MAX_QUANTITY = 1e9  # maximum of weights, prices and resources, so that sums and products stay finite
MIN_QUANTITY = 0.0001  # smallest amount of a resource that Ray distinguishes from none; safe to divide by
NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_DEVICE = r"(cpu|cuda(:\d{1,2})?)"
DEVICE = f"^{_DEVICE}(,{_DEVICE})*$"
CAPABILITY = f"^{CAPABILITY_PATTERN}$"
LABEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,250}[A-Za-z0-9])?$"
_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = rf"^!?({_VALUE}|in\({_VALUE}(, ?{_VALUE})*\))$"
PATTERNS = {  # what each pattern accepts, in words
    NAME: "lower-case letters, digits and hyphens, at most 40",
    DEVICE: "cpu, cuda, or cuda:N; or one for each stage, such as cuda,cpu",
    CAPABILITY: "one such as 7.5 or >=8.0",
    LABEL_NAME: "the name of a label",
    LABEL_VALUE: "a label's value such as T4, in(T4, L4) or !T4",
}
RESERVED = ("ingress",)  # another deployment of the same application has this name


def spec_error(message: str, *at: str | int) -> PydanticCustomError:
    """Return the error that a validator raises; `at` is the path from its own model to the value at fault."""
    return PydanticCustomError("fleet", "{message}", {"message": message, "at": at})


def _is_number_of_replicas(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPLICAS


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return 0 if value.strip() == "0" else parse_size(value)
    except InvalidRequest as error:
        raise spec_error(error.message) from None


def _path(value: Any, info: ValidationInfo) -> Any:
    """Return a path relative to the folder of the fleet file, which the validation context names."""
    if not isinstance(value, str) or not value:
        return value
    return Path((info.context or {}).get("folder", "."), Path(value).expanduser())


def _capability(value: Any) -> Any:
    """Return a compute capability as text, since YAML reads 7.5 as a number."""
    return f"{value:.1f}" if isinstance(value, int | float) and not isinstance(value, bool) else value


_SIZE = {
    "type": ["string", "integer"],
    "pattern": r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]?i?)[bB]?\s*$",
    "minimum": 0,
    "maximum": MAX_SIZE,
}
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0, le=MAX_SIZE), WithJsonSchema(_SIZE)]
FilePath = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string"})]
Name = Annotated[str, Field(pattern=NAME)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=MIN_QUANTITY, le=MAX_QUANTITY, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_QUANTITY, allow_inf_nan=False)]
Timeout = Annotated[float, Field(ge=MIN_QUANTITY, le=MAX_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Parallel = Annotated[int, Field(ge=1, le=MAX_PARALLEL)]
Objective = Annotated[float, Field(ge=0.001, le=1000 * MAX_OBJECTIVE_S, allow_inf_nan=False)]  # milliseconds
LabelName = Annotated[str, Field(pattern=LABEL_NAME)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]
Capability = Annotated[
    str,
    BeforeValidator(_capability),
    Field(pattern=CAPABILITY),
    WithJsonSchema({"type": ["string", "number"], "pattern": CAPABILITY}),
]


class Spec(BaseModel):
    """Base of all types of a fleet file. It guesses nothing: a number is not text, and unknown entries are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


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


class QuantizationSpec(Spec):
    """Quantization of one pool, where it differs from the model's own."""

    model: Text | None = None
    """The same model in another quantization: a folder or a Hugging Face id."""
    cpu_weights: Literal["int4", "int8", "both", "dense"] | None = None
    """Copies of int4 weights that a CPU keeps in memory."""


class EngineSpec(Spec):
    """Limits and settings of a pool's engines, as `motley serve` has them.

    Entries that are left out have its defaults.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Data type of activations."""
    numerics: Literal["exact", "fast"] | None = None
    """exact: batching never changes a token; fast: results may differ within stated bounds."""
    kv_dtype: Literal["int8"] | None = None
    """Data type of KV on a GPU: int8 takes half the memory, and rounds."""
    graphs: bool | None = None
    """Run decode steps as CUDA graphs on a GPU."""
    max_model_len: Count | None = None
    """Maximum number of tokens of a prompt and its output together."""
    max_batch_tokens: Count | None = None
    """Maximum number of tokens that are computed in one step."""
    max_running: Count | None = None
    """Maximum number of sequences that run at the same time."""
    max_waiting: Count | None = None
    """Maximum number of waiting requests; further ones are refused."""
    max_waiting_tokens: Count | None = None
    """Maximum number of prompt tokens of waiting requests; further requests are refused."""
    kv_memory: Size | None = None
    """Memory for KV, such as 2GiB."""
    swap_memory: Size | None = None
    """Host memory for the KV of preempted sequences; 0: none."""
    prefix_buffer: Size | None = None
    """Host memory that buffers prefixes on the way to and from the shared prefix cache."""
    speculate_ngram: int | None = Field(None, ge=0)
    """Maximum number of tokens to speculate in a step: those that followed the same tokens earlier; 0: none."""
    weights_cache: str | None = None
    """Folder that keeps weights in the form that kernels need, for faster starts, or `off`; by default the user's cache
    folder."""
    weights_memory: Size | None = None
    """Device memory for weights. Layers beyond it are read in every step, from disk or from the host memory of a GPU.
    By default all weights stay on the device."""
    weights_host_memory: Size | None = None
    """Pinned host memory for layers that do not fit into a GPU's `weights_memory`; the rest is read from disk. By
    default most of the free memory."""
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    """Number of CPU threads; by default all cores."""
    watchdog_s: Timeout | None = None
    """Seconds that a step may take before the replica counts as unhealthy."""
    frozen_weights: list[Text] | None = None
    """Tensors that no weight update may change, as name patterns such as model.embed_tokens.*"""


ENGINE_NAMES = {  # entries with another name in EngineConfig
    "kv_memory": "kv_memory_bytes",
    "swap_memory": "swap_memory_bytes",
    "prefix_buffer": "prefix_buffer_bytes",
    "weights_memory": "weights_memory_bytes",
    "weights_host_memory": "weights_host_memory_bytes",
}


class ScalingSpec(Spec):
    """Policy that decides how many replicas there are, within each pool's `replicas`.

    Settings have the policy's defaults.
    """

    policy: Literal["fixed", "queue", "slo"] = "fixed"
    """fixed: only operators change the number of replicas; queue: by the load that waits and runs; slo: by what the
    objectives need."""
    running: Positive | None = None
    """For policy queue: wanted number of sequences on each replica, running or waiting."""
    queued_tokens: Positive | None = None
    """For policy queue: wanted number of waiting prompt tokens on each replica."""
    tolerance: NotNegative | None = None
    """For policy queue: a load that deviates by no more than this share changes nothing; 0.2 is 20%."""
    headroom: NotNegative | None = None
    """For policy slo: share of capacity to provide beyond the expected load; 0.2 is 20%."""
    settle_s: Seconds | None = None
    """For policies queue and slo: seconds for which fewer replicas must have been enough before one is removed."""
    cooldown_s: Seconds | None = None
    """For policy slo: seconds between two reductions of the number of replicas."""
    catch_up_s: Positive | None = None
    """For policy slo: seconds within which prompts that wait too long are to be worked off."""
    idle_s: Seconds | None = None
    """For policies queue and slo: seconds without any request after which pools shrink to their minimum, even to 0."""

    SETTINGS: ClassVar[dict[str, frozenset[str]]] = {
        "fixed": frozenset(),
        "queue": frozenset({"running", "queued_tokens", "tolerance", "settle_s", "idle_s"}),
        "slo": frozenset({"headroom", "settle_s", "cooldown_s", "catch_up_s", "idle_s"}),
    }

    @classmethod
    def bounds(cls, setting: str) -> tuple[float, float] | None:
        """Return the least and the most that a setting may be; None if no policy has it."""
        if not any(setting in names for names in cls.SETTINGS.values()):
            return None
        [number] = [each for each in cls.model_json_schema()["properties"][setting]["anyOf"] if "minimum" in each]
        return number["minimum"], number["maximum"]

    @property
    def settings(self) -> dict[str, float]:
        """Settings that the fleet file gives, by name."""
        return {name: value for name, value in self if name != "policy" and value is not None}

    @model_validator(mode="after")
    def _check(self) -> ScalingSpec:
        for name in self.settings:
            if name not in self.SETTINGS[self.policy]:
                having = " or ".join(policy for policy, names in self.SETTINGS.items() if name in names)
                raise spec_error(f"the policy {self.policy!r} has no such setting; {having} has", name)
        return self


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
    def _known(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                accepted_capabilities(value)
        except InvalidRequest as error:
            raise spec_error(error.message) from None
        return value


class SloSpec(Spec):
    """Latency objectives that each request should meet."""

    ttft_ms: Objective
    """Time to first token, in milliseconds."""
    tpot_ms: Objective
    """Time per token after the first one, in milliseconds."""
    shed: bool = False
    """Refuse requests that are predicted to miss the objectives, rather than serve them late."""


class QueueSpec(Spec):
    """Queue of requests in the ingress that no replica takes yet. Tenants take turns by their weights."""

    max_wait_s: Seconds = 10.0
    """Longest wait in seconds while every replica is full; 0: requests are refused at once."""
    hold_s: Seconds = 60.0
    """Longest wait in seconds while there is no replica at all."""
    max_requests: Count = 1024
    """Maximum number of waiting requests; further ones are refused."""
    max_tokens: Count = 1 << 20
    """Maximum number of prompt tokens of waiting requests; further requests are refused."""


class TenantSpec(Spec):
    """Settings of one tenant."""

    weight: Positive = 1.0
    """Share of the service relative to other tenants, when there is not enough for all."""
    cache_group: Text | None = None
    """Tenants of the same group trust each other and reuse each other's prefixes; by default a tenant only reuses its
    own."""


class PrefixCacheSpec(Spec):
    """Reuse and sharing of prompt prefixes, and where they are stored."""

    reuse: bool = True
    """Reuse the KV of earlier requests for prompts that begin with the same tokens."""
    store: Text = EMBEDDED
    """Store through which replicas share prefixes. embedded: a redis-server of the service's own; redis://, rediss://
    or unix://: one that runs already; memory: not shared, each replica keeps its own in the host's memory; off:
    none."""
    memory: Size = 1 << 30
    """Maximum memory of the service's own redis-server or, with `store: memory`, of each replica."""
    ttl_s: Positive = 3600.0
    """Seconds for which Redis keeps a prefix, give or take a tenth."""
    tenant_memory: Size | None = None
    """Most bytes that one tenant may write to Redis within `ttl_s` seconds."""
    secret: FilePath | None = None
    """File with a secret of 32 bytes or more that several services have in common to share prefixes; by default each
    service only shares within itself."""
    wire: Literal["auto", "int8", "float16", "bfloat16"] = "auto"
    """Data type in which the whole fleet stores KV; values are rounded where it is smaller than theirs. auto: as
    replicas have them; with any_numerics bfloat16 if each pool runs on a CPU or on GPUs of compute capability 8.0 or
    above, float16 if one may be below. KV in int8 is always stored as int8."""
    after: Count = 2
    """Number of requests with a prefix after which it is stored."""
    any_numerics: bool = False
    """Let pools share prefixes whatever their numerics and GPUs: last digits of results may then differ, and so
    tokens."""

    @property
    def used(self) -> bool:
        return self.reuse and self.store != OFF

    @property
    def shared(self) -> bool:
        """Whether replicas read what others have computed."""
        return self.used and self.store != MEMORY

    @property
    def live(self) -> frozenset[str]:
        """Entries that change without a new replica: memory, unless it belongs to each replica."""
        return frozenset() if self.store == MEMORY else frozenset({"memory"})

    @field_validator("store")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            check_store(value)
        except ConfigurationError as error:
            raise spec_error(error.message) from None
        return value

    @field_validator("memory", "tenant_memory")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise spec_error("0 is not accepted; expected more than 0; `store: off` keeps nothing")
        return value


class SecuritySpec(Spec):
    """Access control and encryption of the service."""

    api_keys: FilePath | None = None
    """File of API keys, created by `motley keys`. Without it, only this machine may call."""
    open_health: bool = False
    """Answer health checks without a key."""
    cors_origins: list[Text] = Field(default_factory=list)
    """Origins of web pages that may call the service from a browser."""
    tls_cert: FilePath | None = None
    """PEM file with the certificate for serving over TLS."""
    tls_key: FilePath | None = None
    """PEM file with the private key of the certificate."""
    client_ca: FilePath | None = None
    """PEM file with a certificate authority: only clients with a certificate of it are admitted."""
    tls_terminated_upstream: bool = False
    """A proxy in front of the service terminates TLS."""
    weights_roots: list[FilePath] = Field(default_factory=list)
    """Folders on the replicas' hosts from which admins may update the weights; if empty, nobody may."""


class ListenSpec(Spec):
    """Addresses at which the service is reached."""

    host: Text = "127.0.0.1"
    """Address to listen on. Any other than loopback requires API keys and TLS."""
    http_port: Port = 8000
    """Port of the OpenAI-compatible HTTP API."""
    grpc_port: Port = 9000
    """Port of the gRPC APIs."""
    dashboard_port: Port | None = None
    """Port of Ray's dashboard; by default 8265 or another free one."""


class ServiceSpec(Spec):
    """Settings of the service as a whole: timeouts, ingresses and parsers."""

    drain_s: Seconds = 3.0
    """Seconds for which streams may continue when the service stops, or on a removed replica before they move to
    another."""
    stall_s: float = Field(5.0, ge=1, le=7 * 24 * 3600, allow_inf_nan=False)
    """Seconds without a sign of life after which a replica is given up."""
    ingresses: int = Field(1, ge=1, le=16)
    """Number of ingress processes, which accept requests and place them."""
    reader_timeout_s: Timeout = 30.0
    """Seconds without reading after which a client's request is cancelled."""
    tool_parser: Text = "auto"
    """Format in which the model writes tool calls."""
    reasoning_parser: Text = "auto"
    """Format in which the model writes its reasoning before the answer."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Treatment of unknown fields in requests. ignore: each name is logged once; refuse: status 400. Requests of
    motley.v1 with unknown fields are always refused."""
    spare: bool = True
    """Keep a spare process waiting on each node with a replica, which has already imported what the next process needs.
    That one starts 2 s to 3 s sooner, for 0.3 GiB of the node's memory. There is none while less than 2 GiB are
    free."""


class FleetSpec(Spec):
    """Fleet: one model, served by pools of unequal replicas behind one endpoint."""

    model: Text
    """Model to serve: a folder (relative to this file), a Hugging Face id, or `demo`."""
    served_model_name: Text | None = None
    """Name by which clients call the model; by default the name of its folder."""
    pools: list[PoolSpec] = Field(min_length=1)
    """Pools, each of equal replicas."""
    slo: SloSpec | None = None
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
                    f"'int8' is not accepted; prefix_cache.wire is {wire}, and KV in int8 is stored so: "
                    "expected auto or int8 there",
                    *("pools", number, "engine", "kv_dtype"),
                )
            try:
                engine_config(self, pool)
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
