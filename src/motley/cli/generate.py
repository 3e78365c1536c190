"""Command `motley generate`: runs a model in this process, without a service."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .config import ConfigFile
from .numbers import MAX_TEMPERATURE, Between
from .progress import load_bar

if TYPE_CHECKING:
    from ..replicas.engine.entrypoints.offline import Engine
    from ..replicas.engine_config import EngineConfig
    from ..replicas.sampling_params import SamplingParams


_THEIRS = "; default: what the checkpoint asks for."


def generate(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id, or demo.")] = "demo",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file; - is stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Give the prompt as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest output.", min=1)] = 128,
    min_tokens: Annotated[int, typer.Option(help="Shortest output.", min=0)] = 0,
    temperature: Annotated[
        float | None, typer.Option(help=f"0 takes the likeliest token{_THEIRS}"), Between(0.0, MAX_TEMPERATURE)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Sample from this much probability{_THEIRS}"), Between(0.0, 1.0, above=True)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help=f"Sample from so many tokens, 0 from all{_THEIRS}", min=-1)] = None,
    min_p: Annotated[
        float | None, typer.Option(help=f"Drop tokens below this fraction of the best{_THEIRS}"), Between(0.0, 1.0)
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help=f"Above 1 discourages repetition{_THEIRS}"),
        Between(0.0, 10.0, above=True),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed repeats the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    device: options.Devices = "cpu",
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    kv_dtype: options.KvDtype = None,
    cpu_weights: options.CpuWeights = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KVMemory = None,
    swap_memory: options.SwapMemory = None,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    pipeline_layers: options.PipelineLayers = None,
    speculate_ngram: options.SpeculateNgram = 0,
    weights_cache: options.WeightsCache = None,
    weights_memory: options.WeightsMemory = None,
    weights_host_memory: options.WeightsHostMemory = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tell the speed afterwards, on stderr.")] = False,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Continue a prompt with a model in this process; the text streams to the terminal.

    \b
    Examples:
      motley generate demo -p "The with statement"
      motley generate demo --chat -p "What is a generator?" --max-tokens 64 --stats
      motley generate ./my-gptq-model -p "def " -p "class " --temperature 0.8 --seed 1 --json
      motley generate org/name --prompt-file question.txt --stop "User:"
    """
    prompts = _prompts(prompt or [], prompt_file)
    given = _given(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    settings = options.engine_config(
        device=device,
        dtype=dtype,
        numerics=numerics,
        kv_dtype=kv_dtype,
        cpu_weights=cpu_weights,
        threads=threads,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        swap_memory=swap_memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        pipeline_layers=pipeline_layers,
        speculate_ngram=speculate_ngram,
        weights_cache=weights_cache,
        weights_memory=weights_memory,
        weights_host_memory=weights_host_memory,
    )
    path = _folder(model)
    inputs = _inputs(path, prompts, chat=chat, system=system)
    engine = _load(path, settings)
    with options.flags_in_errors():
        sampling = engine.sampling(**given)
    if as_json:
        _print_json(engine, inputs, sampling)
    else:
        _print_text(engine, inputs, sampling, stats=stats)


def _prompts(prompts: list[str], file: Path | None) -> list[str]:
    if file is not None:
        prompts = [*prompts, _read(file)]
    if not prompts and not sys.stdin.isatty():
        prompts = [sys.stdin.read()]
    if not any(prompts):
        raise typer.BadParameter("nothing to continue: give --prompt TEXT, --prompt-file FILE, or text on stdin")
    return prompts


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--prompt-file {file} cannot be read: {error}") from error


def _given(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given, checked before anything is loaded."""
    from ..replicas.sampling_params import SamplingParams

    given = {name: value for name, value in flags.items() if value is not None}
    with options.flags_in_errors():
        SamplingParams(**given)
    return given


def _folder(model: str) -> Path:
    from ..replicas.checkpoint.files.model_hub import resolve_model
    from ..replicas.checkpoint.files.unsupported_formats import refuse_unsupported_files

    folder = resolve_model(options.find_model(model))
    refuse_unsupported_files(folder)  # before its tokenizer is loaded
    return folder


def _inputs(folder: Path, prompts: list[str], *, chat: bool, system: str | None) -> list[str | list[int]]:
    """Return the prompts as texts, or with --chat the token ids of a conversation for each."""
    if not chat:
        if system is not None:
            raise typer.BadParameter("--system needs --chat: a plain prompt has no system message")
        return list(prompts)
    from ..replicas.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    first = [{"role": "system", "content": system}] if system is not None else []
    return [tokenizer.chat([*first, {"role": "user", "content": prompt}]) for prompt in prompts]


def _load(folder: Path, settings: EngineConfig) -> Engine:
    from ..replicas.engine.entrypoints.offline import Engine

    with load_bar(f"loading {folder.name}") as progress:
        return Engine(folder, progress=progress, **asdict(settings))


@dataclass(slots=True)
class _GenerationSpeed:
    """Timer of the first token, and of each token after it."""

    began: float
    first_s: float | None = None
    num_tokens: int = 0

    def count(self, tokens: int) -> None:
        if tokens and self.first_s is None:
            self.first_s = time.perf_counter() - self.began
        self.num_tokens += tokens

    def print_summary(self, reason: object) -> None:
        total_s = time.perf_counter() - self.began
        rest = self.num_tokens - 1
        rate = f", then {rest / (total_s - self.first_s):.1f} tokens/s" if self.first_s is not None and rest > 0 else ""
        print(
            f"{self.num_tokens} tokens in {total_s:.2f} s; first after {self.first_s or total_s:.2f} s{rate}; "
            f"ended by: {reason}",
            file=sys.stderr,
        )


def _print_text(engine: Engine, inputs: list[str | list[int]], sampling: SamplingParams, *, stats: bool) -> None:
    """Print the answers: one prompt streams; several are computed together and printed under their numbers."""
    speed = _GenerationSpeed(time.perf_counter())
    if len(inputs) > 1:
        outputs = engine.generate(inputs, sampling)
        for number, output in enumerate(outputs, start=1):
            typer.echo(f"--- {number} ({output.finish_reason})\n{output.text}")
            speed.num_tokens += len(output.token_ids)
        reason: object = ", ".join(str(output.finish_reason) for output in outputs)
    else:
        reason = _stream(engine, inputs[0], sampling, speed)
    if stats:
        speed.print_summary(reason)


def _stream(engine: Engine, prompt: str | list[int], sampling: SamplingParams, speed: _GenerationSpeed) -> object:
    reason = None
    with closing(engine.stream(prompt, sampling)) as deltas:
        for delta in deltas:
            speed.count(len(delta.token_ids))
            print(delta.text, end="", flush=True)
            reason = delta.finish_reason or reason
    print()
    return reason


def _print_json(engine: Engine, inputs: list[str | list[int]], sampling: SamplingParams) -> None:
    began = time.perf_counter()
    outputs = engine.generate(inputs, sampling)
    rows = [
        {
            "prompt_tokens": len(output.prompt_ids),
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.outputs[0].stop_reason,
        }
        for output in outputs
    ]
    seconds = round(time.perf_counter() - began, 4)
    print(json.dumps({"model": engine.model.name, "seconds": seconds, "outputs": rows, "choices": engine.choices}))
