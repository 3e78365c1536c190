"""Options that several commands share, and what they become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..replicas.engine_config import EngineConfig

ENGINE = "Engine"  # heading in --help, where the version of typer shows one

Device = Annotated[str, typer.Option(help="cpu, or cuda[:INDEX].", rich_help_panel=ENGINE)]
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
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all cores.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and output together.", rich_help_panel=ENGINE)]
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
SpeculateNgram = Annotated[
    int,
    typer.Option(
        metavar="N", help="Try up to N tokens that followed the same tokens before; 0: none.", rich_help_panel=ENGINE
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def engine_config(*, kv_memory: str | None = None, swap_memory: str | None = None, **settings: Any) -> EngineConfig:
    """Flags as an EngineConfig; those that are None keep the engine's default. Raises InvalidRequest."""
    from ..replicas.engine_config import EngineConfig

    given = {name: value for name, value in settings.items() if value is not None}
    if kv_memory is not None:
        given["kv_memory_bytes"] = parse_size(kv_memory, "--kv-memory")
    if swap_memory is not None:
        given["swap_memory_bytes"] = 0 if swap_memory.strip() == "0" else parse_size(swap_memory, "--swap-memory")
    return EngineConfig(**given)


def parse_size(text: str, flag: str) -> int:
    """Bytes: "512MiB", "2G", "1073741824"."""
    from ..replicas.errors import InvalidRequest
    from ..replicas.sizes import parse_size as parse

    try:
        return parse(text)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{flag}: {error.message}") from None


def find_model(model: str) -> str:
    """`demo` is the model that comes with the package; anything else is a folder or a Hugging Face id."""
    if model != "demo":
        return model
    from ..replicas.demo import demo_path

    return str(demo_path())
