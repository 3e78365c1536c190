"""Command `motley profile`: where the time of a model's steps goes on this device, and which module is too slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .config import ConfigFile
from .numbers import MAX_INTEGER
from .progress import load_bar, show_activity

MAX_BATCH = MAX_INTEGER // 2  # a step has as many tokens of prompts beside those that are decoded


def profile(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id, or demo.")] = "demo",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Length of the prompt whose prefill is measured; default: 512, or what fits.", min=1),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.", min=1, max=MAX_BATCH)] = 1,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens in KV of each, at least; default: 512, or what fits.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps that are measured.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Times that the prefill is measured.", min=1)] = 5,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    kv_dtype: options.KvDtype = None,
    cpu_weights: options.CpuWeights = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KVMemory = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a bar for each module as well.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Measure time, bytes and FLOPs of every module in a prefill and in a decode batch, beside the device's roofline.

    Runs the engine that serves. A module that is much slower than its siblings in other layers is named, with the
    likely cause and the remedy; so is one that is far from the roofline for a known cause. Times are measured, bytes
    and FLOPs are arithmetic. The roofline of a CPU is measured in the same run, that of a GPU is from the table of
    devices.

    \b
    Examples:
      motley profile
      motley profile ./my-gptq-model --batch 8 --context-tokens 1024
      motley profile org/name --prompt-tokens 2048 --html profile.html
      motley profile demo --json | python -m json.tool
    """
    settings = options.engine_config(
        device=device,
        dtype=dtype,
        numerics=numerics,
        kv_dtype=kv_dtype,
        cpu_weights=cpu_weights,
        threads=threads,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
    )
    if html is not None:
        _write(html, "")  # fail now rather than after minutes of measuring
    from ..replicas.checkpoint.files.model_hub import resolve_model
    from ..replicas.profiling.profiler import ProfileOptions, load_engine, profile_engine
    from ..replicas.profiling.report import text_report
    from ..replicas.profiling.report.html_page import render_page

    profile_options = ProfileOptions(
        prompt_tokens=prompt_tokens, batch=batch, context_tokens=context_tokens, steps=steps, repeats=repeats
    )
    folder = resolve_model(options.find_model(model))
    with options.flags_in_errors():
        with load_bar(f"loading {folder.name}") as loading:
            loaded = load_engine(folder, settings, profile_options, progress=loading)
        with show_activity("profiling") as show:
            found = profile_engine(loaded, profile_options, show)
    if html is not None:
        _write(html, render_page(found))
    print(json.dumps(text_report.to_json_report(found)) if as_json else text_report.render_text(found))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--html {file} cannot be written: {error.strerror}") from error
