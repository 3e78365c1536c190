"""Options that several commands share, and what they become."""

from __future__ import annotations

import re
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
    str | None, typer.Option(help="KV on a GPU: int8 takes half the memory, and rounds.", rich_help_panel=ENGINE)
]
CpuWeights = Annotated[
    str | None, typer.Option(help="Copies of int4 weights on a CPU: int4, int8 or both.", rich_help_panel=ENGINE)
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: all cores.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and output together.", rich_help_panel=ENGINE)]
KVMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory for KV, such as 2GiB.", rich_help_panel=ENGINE)
]
SpeculateNgram = Annotated[
    int,
    typer.Option(
        metavar="N", help="Try up to N tokens that followed the same tokens before; 0: none.", rich_help_panel=ENGINE
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def engine_config(*, kv_memory: str | None = None, **settings: Any) -> EngineConfig:
    """Flags as an EngineConfig; those that are None keep the engine's default. Raises InvalidRequest."""
    from ..replicas.engine_config import EngineConfig

    given = {name: value for name, value in settings.items() if value is not None}
    if kv_memory is not None:
        given["kv_memory_bytes"] = parse_size(kv_memory, "--kv-memory")
    return EngineConfig(**given)


def parse_size(text: str, flag: str) -> int:
    """Bytes: "512MiB", "2G", "1073741824"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise typer.BadParameter(f"{flag}: {text!r} is no size; expected one such as 512MiB, 2GiB or 1073741824")
    return size


def find_model(model: str) -> str:
    """`demo` is the model that comes with the package; anything else is a folder or a Hugging Face id."""
    if model != "demo":
        return model
    from ..replicas.demo import demo_path

    return str(demo_path())
