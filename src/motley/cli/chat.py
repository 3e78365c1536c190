"""Command `motley chat`: talks to a running service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..replicas.errors import Unavailable
from .config import ConfigFile
from .numbers import MAX_TEMPERATURE, Between

if TYPE_CHECKING:  # gRPC is imported when it is needed: --help is quicker without
    from ..client import Client
    from ..client.generate_requests import CallOptions

HELP = "Enter sends, /reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."
Messages = list[tuple[str, str]]


def chat(
    message: Annotated[str | None, typer.Argument(help="Message to send once; without it, chat interactively.")] = None,
    target: Annotated[
        str, typer.Option("--address", "--target", metavar="HOST:PORT", help="Address of the service's gRPC port.")
    ] = "127.0.0.1:9000",
    api_key: Annotated[
        str | None, typer.Option(envvar="MOTLEY_API_KEY", help="API key, if the service requires one.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect over TLS; --ca, --cert and --key imply it.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option(help="Authorities to trust, a PEM file; default: public ones.", exists=True, dir_okay=False),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(help="Client certificate, if the service asks for one.", exists=True, dir_okay=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The client certificate's key.", exists=True, dir_okay=False)] = None,
    model: Annotated[str | None, typer.Option(help="Model; default: the one it serves.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", min=1)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; default: the service's."), Between(0.0, MAX_TEMPERATURE)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed repeats the same answer.")] = None,
    config: ConfigFile = None,
) -> None:
    """Chat with a running service; answers stream, and go on if a replica is lost.

    \b
    Examples:
      motley chat "What does the with statement do?"
      motley chat --system "Answer in one sentence." --temperature 0
      git diff | motley chat "Say what changes here:"
      motley chat --address gpu-box:9000 --tls --api-key "$KEY"
    """
    from ..client import Client, Tls

    wanted = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "model": model}
    options: CallOptions = {name: value for name, value in wanted.items() if value is not None}  # type: ignore[assignment]
    messages = [("system", system)] if system is not None else []
    if not sys.stdin.isatty() and message is not None:
        message = f"{message}\n{sys.stdin.read()}".strip()
    secure = Tls(ca, cert, key) if tls or ca or cert or key else None
    with _errors_with_address(target), Client(target, api_key=api_key, tls=secure) as client:
        if message is not None:
            _print_response(client, options, [*messages, ("user", message)])
        else:
            print(f"{model or client.models()[0].name} at {target}. {HELP}", file=sys.stderr)
            _talk(client, options, messages)


@contextmanager
def _errors_with_address(target: str) -> Iterator[None]:
    """Add the address to the error of a service that cannot be reached, since gRPC's own text helps nobody."""
    try:
        yield
    except Unavailable as error:
        if "failed to connect" not in error.message:
            raise
        raise Unavailable(
            f"no service answers at {target}; start one with `motley serve`, or give its --address"
        ) from error


def _talk(client: Client, options: CallOptions, first: Messages) -> None:
    messages = list(first)
    while (line := _line()) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages = list(first)
        elif line:
            messages.append(("user", line))
            messages.append(("assistant", _print_response_or_stop(client, options, messages)))


def _line() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _print_response_or_stop(client: Client, options: CallOptions, messages: Messages) -> str:
    shown: list[str] = []
    try:
        _print_response(client, options, messages, shown)
    except KeyboardInterrupt:
        print("  [stopped]")
    return "".join(shown)


def _print_response(client: Client, options: CallOptions, messages: Messages, shown: list[str] | None = None) -> None:
    """Print an answer as it arrives, and note its text; a terminal also shows the model's reasoning. Leaving early
    cancels it.
    """
    with client.chat_stream(messages, **options) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.reasoning_content and sys.stdout.isatty():
                    print(f"\033[2m{choice.reasoning_content}\033[0m", end="", flush=True)  # dim
                print(choice.text, end="", flush=True)
                if shown is not None:
                    shown.append(choice.text)
    print()
