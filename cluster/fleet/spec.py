"""What a fleet is: the model, pools of like replicas, and objectives. As fleet files have it, and JSON."""

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

from ...replicas.engine_config import MAX_COUNT, MAX_PARALLEL, MAX_THREADS, EngineConfig, PrefixWire
from ...replicas.errors import InvalidRequest
from ...replicas.shown import first_double, shown
from ...replicas.sizes import MAX_SIZE, parse_size
from ..failures import ConfigurationError
from ..prefix.source import EMBEDDED, MEMORY, OFF, check_store
from .capability import PATTERN, capabilities_of
from .common import common_dtype

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
MAX_OBJECTIVE_S = 3600.0  # more is none
MAX_QUANTITY = 1e9  # of weights, prices, resources: their sums and products stay finite
LEAST = 0.0001  # the least of a resource that Ray tells from none; one can divide by it
NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_DEVICE = r"(cpu|cuda(:\d{1,2})?)"
DEVICE = f"^{_DEVICE}(,{_DEVICE})*$"
CAPABILITY = f"^{PATTERN}$"
LABEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,250}[A-Za-z0-9])?$"
_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = rf"^!?({_VALUE}|in\({_VALUE}(, ?{_VALUE})*\))$"
PATTERNS = {  # in words
    NAME: "lower-case letters, digits and hyphens, at most 40",
    DEVICE: "cpu, cuda, or cuda:N; or one for each stage, such as cuda,cpu",
    CAPABILITY: "one such as 7.5 or >=8.0",
    LABEL_NAME: "the name of a label",
    LABEL_VALUE: "a label's value such as T4, in(T4, L4) or !T4",
}
RESERVED = ("ingress",)  # a deployment of the same application


def refused(message: str, *at: str | int) -> PydanticCustomError:
    """What a validator raises: `at` leads from its own model to the value at fault."""
    return PydanticCustomError("fleet", "{message}", {"message": message, "at": at})


def _is_number_of_replicas(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPLICAS


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return 0 if value.strip() == "0" else parse_size(value)
    except InvalidRequest as error:
        raise refused(error.message) from None


def _path(value: Any, info: ValidationInfo) -> Any:
    """Relative to the file's folder, which is the context."""
    if not isinstance(value, str) or not value:
        return value
    return Path((info.context or {}).get("folder", "."), Path(value).expanduser())


def _capability(value: Any) -> Any:
    """7.5 is a number to YAML, and 8.0 another."""
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
Positive = Annotated[float, Field(ge=LEAST, le=MAX_QUANTITY, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_QUANTITY, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Parallel = Annotated[int, Field(ge=1, le=MAX_PARALLEL)]
Objective = Annotated[float, Field(ge=0.001, le=1000 * MAX_OBJECTIVE_S, allow_inf_nan=False)]  # in milliseconds
LabelName = Annotated[str, Field(pattern=LABEL_NAME)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]
Capability = Annotated[
    str,
    BeforeValidator(_capability),
    Field(pattern=CAPABILITY),
    WithJsonSchema({"type": ["string", "number"], "pattern": CAPABILITY}),
]


class Spec(BaseModel):
    """Nothing is guessed: a number is no text, and what is not known is refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class ReplicaRange(Spec):
    """How many: `replicas: 2` is two, always."""

    min: int = Field(1, ge=0, le=MAX_REPLICAS)
    """At least so many, whatever the load; 0: none while nobody asks."""
    max: int = Field(1, ge=1, le=MAX_REPLICAS)
    """At most."""
    start: int = Field(1, ge=0, le=MAX_REPLICAS)
    """To begin with; by default `min`, and at least 1."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value, "start": value}
        if isinstance(value, ReplicaRange):
            return value
        if not isinstance(value, dict):
            raise refused(f"{shown(value)} is not accepted; expected a whole number, or entries such as min: 1, max: 4")
        low = value.get("min", 1)
        start = value.get("start", max(1, low) if _is_number_of_replicas(low) else 1)
        high = max(low, start, 1) if _is_number_of_replicas(low) and _is_number_of_replicas(start) else 1
        return {"max": high, **value, "start": start, "min": low}

    @model_validator(mode="after")
    def _check(self) -> ReplicaRange:
        if self.max < self.min:
            raise refused(f"{self.max} is not accepted; expected at least min ({self.min})", "max")
        if not self.min <= self.start <= self.max:
            raise refused(f"{self.start} is not accepted; expected min to max ({self.min} to {self.max})", "start")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        whole = {"type": "integer", "minimum": 1, "maximum": MAX_REPLICAS}
        return {"anyOf": [whole, {key: value for key, value in schema.items() if key != "default"}]}


class HiddenSpec(Spec):
    """How far a simulated GPU is off what its profile says: what no router knows."""

    share: float = Field(0.3, ge=0, lt=1)
    """Up to this share, bandwidth and arithmetic apart."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    """The same every time, and for each replica; by default every replica is off by chance."""


class AttainedSpec(Spec):
    """Shares of the roofline that a simulated GPU's kernels reach."""

    bandwidth: float = Field(0.65, ge=LEAST, le=2)
    """Of the memory's."""
    arithmetic: float = Field(0.5, ge=LEAST, le=2)
    """Of what multiplies at most."""
    step_s: float = Field(0.0005, gt=0, le=10)
    """Seconds that a step costs beside them."""
    measured: str = Field("", max_length=1024)
    """The file that they are fitted to, where they are."""


class QuantizationSpec(Spec):
    """Of one pool, where it differs from the model's own."""

    model: Text | None = None
    """The same model in another quantization: a folder or a Hugging Face id."""
    cpu_weights: Literal["int4", "int8", "both", "dense"] | None = None
    """Which copies of int4 weights a CPU keeps."""


class EngineSpec(Spec):
    """Limits and settings of a pool's engines, as `motley serve` has them; what is not said is its default."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Of activations."""
    numerics: Literal["exact", "fast"] | None = None
    """exact: a batch never changes a token; fast: within stated bounds."""
    kv_dtype: Literal["int8"] | None = None
    """Of KV on a GPU: half the memory, rounded."""
    graphs: bool | None = None
    """On a GPU, decode as CUDA graphs."""
    max_model_len: Count | None = None
    """Tokens of prompt and output together."""
    max_batch_tokens: Count | None = None
    """Tokens computed per step."""
    max_running: Count | None = None
    """Sequences per step."""
    max_waiting: Count | None = None
    """Requests that may wait; more are refused."""
    max_waiting_tokens: Count | None = None
    """Prompt tokens that may wait; more are refused."""
    kv_memory: Size | None = None
    """Memory for KV, such as 2GiB."""
    swap_memory: Size | None = None
    """Host memory for KV of preempted sequences, or 0."""
    prefix_buffer: Size | None = None
    """Host memory for prefixes on their way to and from where they are shared."""
    speculate_ngram: int | None = Field(None, ge=0)
    """Tokens tried in a step that followed the same tokens before; 0: none."""
    weights_cache: str | None = None
    """Folder of weights as kernels hold them, for the next start, or off; by default the user's own cache."""
    weights_memory: Size | None = None
    """Memory of the device for weights; layers beyond come from disk, or a GPU's host. By default all stay there."""
    weights_host_memory: Size | None = None
    """Pinned memory of a GPU's host for such layers; the rest is read from disk. By default most of what is free."""
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    """CPU threads; by default all cores."""
    watchdog_s: Positive | None = None
    """A step longer than this makes a replica unhealthy."""
    frozen_weights: list[Text] | None = None
    """Names of tensors that no update of the weights may change, as patterns such as model.embed_tokens.*"""


ENGINE_NAMES = {  # in EngineConfig
    "kv_memory": "kv_memory_bytes",
    "swap_memory": "swap_memory_bytes",
    "prefix_buffer": "prefix_buffer_bytes",
    "weights_memory": "weights_memory_bytes",
    "weights_host_memory": "weights_host_memory_bytes",
}


class ScalingSpec(Spec):
    """Who decides how many replicas there are, within each pool's `replicas`. Settings have defaults of the policy."""

    policy: Literal["fixed", "queue", "slo"] = "fixed"
    """fixed: only whoever asks for it; queue: by what waits; slo: by what the objectives need."""
    running: Positive | None = None
    """queue: sequences wanted on each replica, running or waiting."""
    queued_tokens: Positive | None = None
    """queue: tokens of waiting prompts wanted on each replica."""
    tolerance: NotNegative | None = None
    """queue: a load so close to that changes nothing; 0.2 is 20%."""
    headroom: NotNegative | None = None
    """slo: so much more than what is expected is provided for; 0.2 is 20%."""
    settle_s: Seconds | None = None
    """queue, slo: fewer replicas must have sufficed for so long before one goes."""
    cooldown_s: Seconds | None = None
    """slo: between two changes to fewer."""
    catch_up_s: Positive | None = None
    """slo: in which prompts that wait too long are to be worked off."""
    idle_s: Seconds | None = None
    """queue, slo: without any request for so long, pools go down to their minimum, 0 too."""

    SETTINGS: ClassVar[dict[str, frozenset[str]]] = {
        "fixed": frozenset(),
        "queue": frozenset({"running", "queued_tokens", "tolerance", "settle_s", "idle_s"}),
        "slo": frozenset({"headroom", "settle_s", "cooldown_s", "catch_up_s", "idle_s"}),
    }

    @property
    def settings(self) -> dict[str, float]:
        """Those that are said."""
        return {name: value for name, value in self if name != "policy" and value is not None}

    @model_validator(mode="after")
    def _check(self) -> ScalingSpec:
        for name in self.settings:
            if name not in self.SETTINGS[self.policy]:
                having = " or ".join(policy for policy, names in self.SETTINGS.items() if name in names)
                raise refused(f"the policy {self.policy!r} has no such setting; {having} has", name)
        return self


class BundleSpec(Spec):
    """What one process of a replica books."""

    cpus: Positive = 1.0
    """Of Ray's logical CPUs; it computes with as many threads, unless `threads` of the engine says how many."""
    resources: dict[Text, Positive] = Field(default_factory=dict)
    """Of Ray's own."""
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """A node with these labels, and the pool's."""


class PoolSpec(Spec):
    """Like replicas: where they run, and with which limits."""

    name: Name
    """Of the pool, in metrics and commands."""
    replicas: ReplicaRange = Field(default_factory=lambda: ReplicaRange.model_validate({}))
    device: str | None = Field(None, pattern=DEVICE)
    """cpu; cuda: one GPU for each process of a replica, given by Ray; cuda:1: that one of its machine, and of a divided
    replica those after it; cuda,cpu: of stages that are unlike, one for each. By default cuda where an accelerator or a
    compute capability is asked for, else cpu."""
    accelerator: LabelValue | None = None
    """Nodes whose label ray.io/accelerator-type is this: T4, A10, in(A10, A10G)."""
    compute_capability: Capability | None = None
    """Nodes whose label motley/compute-capability is this, or at least this: 7.5, ">=8.0"."""
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """Nodes with these labels."""
    resources: dict[Text, Positive] = Field(default_factory=dict)
    """Of Ray's own, for each replica."""
    cpus: NotNegative | None = None
    """Of Ray's logical CPUs, for each replica; by default 1 for each of its processes."""
    simulate: Text | None = None
    """A GPU's name: compute nothing, and take the time that the roofline says it would."""
    simulate_model: Text | None = None
    """Whose time: qwen2.5-7b, llama-3-8b, ...; by default the model's own."""
    measured: FilePath | None = None
    """What that GPU has measured, which the simulated one takes: a JSON file of `motley bench gpu` (streams.json) or
    `bench engine`, or of prefill_tokens_per_s, decode_s and context_s as a replica's profile has them."""
    attained: AttainedSpec | None = None
    """What its kernels reach; by default fitted to `measured`, or assumed."""
    hidden: HiddenSpec = HiddenSpec.model_validate({})
    """Of a simulated GPU."""
    tensor_parallel: Parallel = 1
    """Processes that share each layer, each with a GPU of its own where the pool has GPUs."""
    pipeline_parallel: Parallel = 1
    """Stages that hold some of the layers each: each of as many processes as share its layers."""
    pipeline_layers: list[Count] | None = None
    """How many layers each stage has; by default, so that the slowest takes the least."""
    bundles: list[BundleSpec] | None = None
    """Of each process of a divided replica, stage by stage and of each its ranks: a placement group of Ray's, where the
    replica has the first and each other process is an actor in its own; on GPUs each has one. By default they are its
    subprocesses, and it books for all."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] | None = None
    """How Ray places the bundles: by default STRICT_PACK, on one node. By others they may be on several, and are joined
    over TCP then, which is not encrypted, and share no prefixes."""
    quantization: QuantizationSpec = QuantizationSpec.model_validate({})
    engine: EngineSpec = EngineSpec.model_validate({})
    cost_per_hour: NotNegative = 0.0
    """Of one replica, in any currency."""
    cold_start_s: Seconds = 60.0
    """From a new target to a replica that serves."""

    LIVE: ClassVar[frozenset[str]] = frozenset({"replicas", "cost_per_hour", "cold_start_s"})
    """What no replica knows of: it changes without a restart."""

    @property
    def where(self) -> str:
        """Its device, said or not."""
        return self.device or ("cuda" if self.accelerator or self.compute_capability else "cpu")

    @property
    def processes(self) -> int:
        """Of each replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def gpus(self) -> list[bool]:
        """Of each process of a replica, stage by stage, whether it has one."""
        stages = self.where.split(",")
        stages = stages if len(stages) > 1 else stages * self.pipeline_parallel
        return [stage != "cpu" for stage in stages for _ in range(self.tensor_parallel)]

    @property
    def spread(self) -> bool:
        """Whether a replica may be on several nodes."""
        return self.strategy not in (None, "STRICT_PACK")

    @property
    def booked_cpus(self) -> float:
        """Of Ray's, for each replica with all its processes."""
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
                raise refused(f"{number} is not accepted; of simulated GPUs {what} are not built: expected 1", name)
        if self.pipeline_layers is not None and len(self.pipeline_layers) != self.pipeline_parallel:
            raise refused(
                f"{self.pipeline_layers} is not accepted; expected a number for each of {self.pipeline_parallel} "
                "stages",
                "pipeline_layers",
            )
        if self.where.count(",") not in (0, self.pipeline_parallel - 1):
            expected = f"expected one, or one for each of {self.pipeline_parallel} stages"
            raise refused(f"{self.where!r} is not accepted; {expected}", "device")
        self._check_bundles()
        if self.name in RESERVED:
            raise refused(f"{self.name!r} is not accepted; it is the name of another part of the service", "name")
        if self.simulate is None and self.simulate_model is not None:
            raise refused("of what `simulate` names a GPU for", "simulate_model")
        for name in ("measured", "attained"):
            if self.simulate is None and getattr(self, name) is not None:
                raise refused("of what `simulate` names a GPU for", name)
        if self.measured is not None and self.attained is not None:
            raise refused("attained is fitted to `measured`: one or the other", "attained")
        if self.simulate is None and self.hidden != HiddenSpec.model_validate({}):
            raise refused("of what `simulate` names a GPU for", "hidden")
        if self.simulate is not None and self.where != "cpu":
            at = next(each for each in ("device", "accelerator", "compute_capability") if getattr(self, each))
            raise refused("a simulated GPU is computed on a CPU: one or the other", at)
        if not any(self.gpus) and (self.accelerator or self.compute_capability):
            raise refused("'cpu' is not accepted: the pool asks for a kind of GPU; expected cuda", "device")
        return self

    def _check_bundles(self) -> None:
        if self.bundles is None:
            if self.strategy is not None:
                raise refused("of `bundles`, and there are none", "strategy")
            return
        if self.processes == 1:
            message = "of the processes of a divided replica: expected `tensor_parallel` or `pipeline_parallel` above 1"
            raise refused(message, "bundles")
        if len(self.bundles) != self.processes:
            message = f"{len(self.bundles)} are not accepted; expected one for each of {self.processes} processes"
            raise refused(message, "bundles")
        for name, given in (("cpus", self.cpus is not None), ("resources", bool(self.resources))):
            if given:
                raise refused("of a replica without `bundles`, each of which has its own", name)
        if ":" in self.where:
            raise refused(f"{self.where!r} is not accepted with `bundles`; expected cuda, of which Ray gives", "device")

    @field_validator("compute_capability")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                capabilities_of(value)
        except InvalidRequest as error:
            raise refused(error.message) from None
        return value


class SloSpec(Spec):
    """What a request is to keep."""

    ttft_ms: Objective
    """To the first token, in milliseconds."""
    tpot_ms: Objective
    """Per token after it, in milliseconds."""
    shed: bool = False
    """Refuse what is predicted to miss them, rather than serve it late."""


class QueueSpec(Spec):
    """How requests wait at the entrance, tenants in turns by their weights."""

    max_wait_s: Seconds = 10.0
    """While every replica is full; 0: they are refused at once."""
    hold_s: Seconds = 60.0
    """While there is no replica at all."""
    max_requests: Count = 1024
    """That may wait; more are refused."""
    max_tokens: Count = 1 << 20
    """Of their prompts."""


class TenantSpec(Spec):
    weight: Positive = 1.0
    """Share beside the other tenants, where there is not enough for all."""
    cache_group: Text | None = None
    """Tenants of one group trust each other, and find each other's prefixes; by default nobody else's are found."""


class PrefixCacheSpec(Spec):
    reuse: bool = True
    """Find prompts' prefixes in the KV of earlier requests."""
    store: Text = EMBEDDED
    """Where replicas share them. embedded: a redis-server of the service's own; redis://, rediss:// or unix://: one
    that runs already; memory: each replica keeps its own in the host's memory; off."""
    memory: Size = 1 << 30
    """Of the redis-server of its own, or of each replica."""
    ttl_s: Positive = 3600.0
    """How long Redis keeps one, give or take a tenth."""
    tenant_memory: Size | None = None
    """That a tenant may write to Redis within ttl_s."""
    secret: FilePath | None = None
    """File with 32 bytes or more that services have in common to share prefixes; by default each is for itself."""
    wire: Literal["auto", "int8", "float16", "bfloat16"] = "auto"
    """How the whole fleet's numbers of KV are stored, rounded where that is less than they are. auto: as they are; with
    any_numerics bfloat16 where each pool is of a CPU or of compute capability 8.0 or above, float16 where one may be
    below. KV in int8 is stored so."""
    after: Count = 2
    """How often a prefix must be asked for before it is stored."""
    any_numerics: bool = False
    """Pools share what they compute whatever their numerics and GPUs: last digits may differ then, and so tokens."""

    @property
    def used(self) -> bool:
        return self.reuse and self.store != OFF

    @property
    def shared(self) -> bool:
        """Replicas read what others have computed."""
        return self.used and self.store != MEMORY

    @property
    def live(self) -> frozenset[str]:
        """What changes without another replica: memory, unless it is each replica's."""
        return frozenset() if self.store == MEMORY else frozenset({"memory"})

    @field_validator("store")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            check_store(value)
        except ConfigurationError as error:
            raise refused(error.message) from None
        return value

    @field_validator("memory", "tenant_memory")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise refused("0 is not accepted; expected more than 0; `store: off` keeps nothing")
        return value


class SecuritySpec(Spec):
    """Who may call, and how."""

    api_keys: FilePath | None = None
    """File of API keys, made by `motley keys`; without, only this machine may call."""
    open_health: bool = False
    """Health is told without a key."""
    cors_origins: list[Text] = Field(default_factory=list)
    """Web pages from there may call."""
    tls_cert: FilePath | None = None
    """PEM file: serve over TLS with this certificate."""
    tls_key: FilePath | None = None
    """PEM file: its key."""
    client_ca: FilePath | None = None
    """PEM file: admit clients with a certificate of this authority only."""
    tls_terminated_upstream: bool = False
    """What stands before this does TLS."""
    weights_roots: list[FilePath] = Field(default_factory=list)
    """Folders of the replicas' hosts from which admins may update the weights; with none, nobody may."""


class ListenSpec(Spec):
    """Where the service is reached."""

    host: Text = "127.0.0.1"
    """Off loopback with API keys and TLS only."""
    http_port: Port = 8000
    """OpenAI's HTTP."""
    grpc_port: Port = 9000
    """gRPC."""
    dashboard_port: Port | None = None
    """Ray's dashboard; by default 8265 or another free one."""


class ServiceSpec(Spec):
    drain_s: Seconds = 3.0
    """How long streams may go on at the end, or on a replica that is taken away before they move."""
    stall_s: float = Field(5.0, ge=1, le=7 * 24 * 3600, allow_inf_nan=False)
    """A replica that shows no sign of life for so long is given up."""
    ingresses: int = Field(1, ge=1, le=16)
    """Processes that take requests in and place them."""
    reader_timeout_s: Positive = 30.0
    """A client that reads nothing for so long is left."""
    tool_parser: Text = "auto"
    """How the model writes calls of tools."""
    reasoning_parser: Text = "auto"
    """How it writes what it thinks before it answers."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What becomes of a field of a request that nobody knows. ignore: each name is logged once; refuse: status 400.
    Over motley.v1 it is always refused."""
    spare: bool = True
    """On each node with a replica another process waits, which has imported what the next one needs: it is there 2 s to
    3 s sooner, for 0.3 GiB of the node's memory. Where less than 2 GiB of that are free, none does."""


class FleetSpec(Spec):
    """One model, served by pools of unequal replicas behind one endpoint."""

    model: Text
    """A folder (relative to this file), a Hugging Face id, or demo."""
    served_model_name: Text | None = None
    """What clients call it; by default its folder's name."""
    pools: list[PoolSpec] = Field(min_length=1)
    """Of like replicas each."""
    slo: SloSpec | None = None
    queue: QueueSpec = QueueSpec.model_validate({})
    scaling: ScalingSpec = ScalingSpec.model_validate({})
    tenants: dict[Text, TenantSpec] = Field(default_factory=dict)
    """By the names that the file of API keys has."""
    prefix_cache: PrefixCacheSpec = PrefixCacheSpec.model_validate({})
    security: SecuritySpec = SecuritySpec.model_validate({})
    listen: ListenSpec = ListenSpec.model_validate({})
    service: ServiceSpec = ServiceSpec.model_validate({})

    FIXED: ClassVar[frozenset[str]] = frozenset({"model", "served_model_name", "security", "listen", "service"})
    """What does not change while it runs."""

    @model_validator(mode="after")
    def _check(self) -> FleetSpec:
        double = first_double(pool.name for pool in self.pools)
        if double is not None:
            last = max(number for number, pool in enumerate(self.pools) if pool.name == double)
            raise refused(f"{double!r} is the name of another pool already", "pools", last, "name")
        if all(pool.replicas.start == 0 for pool in self.pools):
            raise refused("0 is not accepted of every pool; expected one to start with", "pools", 0, "replicas")
        wire = self.prefix_cache.wire
        for number, pool in enumerate(self.pools):
            if self.prefix_cache.used and _keeps_int8(pool) and wire in ("float16", "bfloat16"):
                raise refused(
                    f"'int8' is not accepted; prefix_cache.wire is {wire}, and KV in int8 is stored so: "
                    "expected auto or int8 there",
                    *("pools", number, "engine", "kv_dtype"),
                )
            try:
                engine_config(self, pool)
            except InvalidRequest as error:
                names = {config: name for name, config in ENGINE_NAMES.items()}
                name = names.get(str(error.param), str(error.param))
                raise refused(error.message.partition(": ")[2], "pools", number, "engine", name) from None
        return self

    def pool(self, name: str) -> PoolSpec | None:
        return next((pool for pool in self.pools if pool.name == name), None)


def engine_config(spec: FleetSpec, pool: PoolSpec) -> EngineConfig:
    """Of that pool's engines. Raises InvalidRequest."""
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
        prefix_wire=wire_of(spec, pool),
        prefix_after=spec.prefix_cache.after,
        prefix_any_numerics=spec.prefix_cache.any_numerics,
        reader_timeout_s=spec.service.reader_timeout_s,
        **given,
    )


def settled_wire(spec: FleetSpec) -> tuple[PrefixWire | None, str]:
    """How all of the fleet have KV in records, and why. None: each replica as it has KV itself."""
    cache = spec.prefix_cache
    if cache.wire != "auto":
        return cache.wire, "as configured"
    if not cache.any_numerics or not cache.shared:
        return None, "no pool reads what another numerics class has computed"
    return common_dtype(pool for pool in spec.pools if pool.simulate is None and not _keeps_int8(pool))


def wire_of(spec: FleetSpec, pool: PoolSpec) -> PrefixWire | None:
    """As its engines are told. What is in int8 stays so: such pools share with each other, or by `wire: int8`."""
    return None if spec.prefix_cache.wire == "auto" and _keeps_int8(pool) else settled_wire(spec)[0]


def _keeps_int8(pool: PoolSpec) -> bool:
    return pool.engine.kv_dtype == "int8"


def model_of(spec: FleetSpec, pool: PoolSpec) -> str:
    """The checkpoint that its replicas load."""
    return pool.quantization.model or spec.model
