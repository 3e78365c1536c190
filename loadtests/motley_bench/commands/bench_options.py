"""Options that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BenchOut = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")]
# Of benchmarks that read weights from a disk.
DiskShape = Annotated[str, typer.Option(help="qwen2-0.5b, qwen2-1.5b, quick or tiny.")]
DiskFormats = Annotated[list[str] | None, typer.Option(help="bf16 or gptq-int4; may be repeated; default: both.")]
DiskFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder on the disk to read; default: for temporary files.")
]
