"""`motley chat`: talk to a running service."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from .config import ConfigFile
from .openai_http import Service

HELP = "Enter sends, /reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this once; without it, talk.")] = None,
    url: Annotated[str, typer.Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="MOTLEY_API_KEY", help="If the service wants one.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the one it serves.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the service's.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed repeats the same answer.")] = None,
    config: ConfigFile = None,
) -> None:
    """Chat with a running service; answers stream.

    \b
    Examples:
      motley chat "What does the with statement do?"
      motley chat --system "Answer in one sentence." --temperature 0
      git diff | motley chat "Say what changes here:"
      motley chat --url http://gpu-box:8080 --api-key "$KEY"
    """
    service = Service(url, api_key)
    wanted = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    body["model"] = model or service.model()
    messages = [{"role": "system", "content": system}] if system is not None else []
    if not sys.stdin.isatty() and message is not None:
        message = f"{message}\n{sys.stdin.read()}".strip()
    if message is not None:
        _answer(service, body, [*messages, {"role": "user", "content": message}])
    else:
        _talk(service, body, messages)


def _talk(service: Service, body: dict[str, Any], first: list[dict[str, str]]) -> None:
    print(f"{body['model']} at {service.url}. {HELP}", file=sys.stderr)
    messages = list(first)
    while (line := _line()) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages = list(first)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer_or_stop(service, body, messages)})


def _line() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer_or_stop(service: Service, body: dict[str, Any], messages: list[dict[str, str]]) -> str:
    shown: list[str] = []
    try:
        _answer(service, body, messages, shown)
    except KeyboardInterrupt:
        print("  [stopped]")
    return "".join(shown)


def _answer(
    service: Service, body: dict[str, Any], messages: list[dict[str, str]], shown: list[str] | None = None
) -> None:
    """Print an answer as it comes, and note what was printed. Leaving early closes the call, which cancels it."""
    with closing(service.chat({**body, "messages": messages})) as texts:
        for text in texts:
            print(text, end="", flush=True)
            if shown is not None:
                shown.append(text)
    print()
