"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..replicas.engine_config import EngineConfig

ENGINE = "Engine"  # heading in --help, where the version of typer shows one

Device = Annotated[str, typer.Option(help="cpu, or cuda[:INDEX].", rich_help_panel=ENGINE)]
Devices = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, or cuda[:INDEX]; or one for each stage, such as cuda,cpu.", rich_help_panel=ENGINE
    ),
]
Dtype = Annotated[str, typer.Option(help="Activations: auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE)]
Numerics = Annotated[
    str | None,
    typer.Option(
        help="exact (a CPU's default): a batch never changes a token; fast (a GPU's): within stated bounds.",
        rich_help_panel=ENGINE,
    ),
]
KvDtype = Annotated[
    str | None, typer.Option(help="KV: int8 takes about half the memory, and rounds.", rich_help_panel=ENGINE)
]
CpuWeights = Annotated[
    str | None, typer.Option(help="Copies of int4 weights on a CPU: int4, int8 or both.", rich_help_panel=ENGINE)
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; default: all cores.", min=1, max=4096, rich_help_panel=ENGINE)
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and output together.", min=1, rich_help_panel=ENGINE)
]
KVMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory for KV, such as 2GiB.", rich_help_panel=ENGINE)
]
SwapMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory for KV of preempted sequences, or 0; default: 4GiB for a GPU, none for a CPU.",
        rich_help_panel=ENGINE,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Divide the model among N processes, each with its share of the threads, or with a GPU of its own.",
        min=1,
        max=1024,
        rich_help_panel=ENGINE,
    ),
]
PipelineParallel = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Divide the layers among N stages, each of as many processes as --tensor-parallel says.",
        min=1,
        max=1024,
        rich_help_panel=ENGINE,
    ),
]
PipelineLayers = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS",
        help="How many layers each stage has, such as 6,18; default: so that the slowest takes the least.",
        rich_help_panel=ENGINE,
    ),
]
SpeculateNgram = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Try up to N tokens that followed the same tokens before; 0: none.",
        min=0,
        max=32,
        rich_help_panel=ENGINE,
    ),
]
WeightsCache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|off",
        help="Weights as kernels hold them, for the next start; default: in the user's cache folder.",
        rich_help_panel=ENGINE,
    ),
]
WeightsMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the device for weights; layers beyond it come from disk, or from a GPU's host, in every step; "
        "default: all are there.",
        rich_help_panel=ENGINE,
    ),
]
WeightsHostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Pinned memory of a GPU's host for layers beyond --weights-memory; the rest is read from disk; "
        "default: most of what is free.",
        rich_help_panel=ENGINE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def engine_config(
    *,
    kv_memory: str | None = None,
    swap_memory: str | None = None,
    weights_memory: str | None = None,
    weights_host_memory: str | None = None,
    pipeline_layers: str | None = None,
    **settings: Any,
) -> EngineConfig:
    """Return the flags as an EngineConfig; those that are None keep the engine's default. Raises InvalidRequest."""
    from ..replicas.engine_config import EngineConfig

    given = {name: value for name, value in settings.items() if value is not None}
    if kv_memory is not None:
        given["kv_memory_bytes"] = parse_size(kv_memory, "--kv-memory")
    if swap_memory is not None:
        given["swap_memory_bytes"] = 0 if swap_memory.strip() == "0" else parse_size(swap_memory, "--swap-memory")
    if weights_memory is not None:
        given["weights_memory_bytes"] = parse_size(weights_memory, "--weights-memory")
    if weights_host_memory is not None:
        given["weights_host_memory_bytes"] = parse_size(weights_host_memory, "--weights-host-memory")
    if pipeline_layers is not None:
        given["pipeline_layers"] = _numbers(pipeline_layers, "--pipeline-layers")
    with flags_in_errors():
        return EngineConfig(**given)


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Name the flag that the user gave, in place of the setting that it became, in errors about settings."""
    from ..replicas.errors import InvalidRequest

    try:
        yield
    except InvalidRequest as error:
        setting = error.param or ""
        if not setting or not error.message.startswith(f"{setting}:"):
            raise
        flag = f"--{setting.removesuffix('_bytes').replace('_', '-')}"
        raise typer.BadParameter(error.message.replace(setting, flag, 1)) from None


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    """Parse a list of numbers such as "6,18"."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{flag}: {text!r} is not accepted; expected numbers such as 6,18") from None


def parse_size(text: str, flag: str) -> int:
    """Parse a number of bytes such as "512MiB", "2G" or "1073741824"."""
    from ..replicas.byte_sizes import parse_size as parse
    from ..replicas.errors import InvalidRequest

    try:
        return parse(text)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{flag}: {error.message}") from None


def find_model(model: str) -> str:
    """Return the model's folder or Hugging Face id; `demo` is the model that comes with the package."""
    if model != "demo":
        return model
    from ..replicas.demo import demo_path

    return str(demo_path())
