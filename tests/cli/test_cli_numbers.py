"""Every number of every command, by flag and by `--config`, as nobody should write it: right, or refused by its name.

Options come from the commands' own signatures, so one that is added is tried too. No command begins: only what it
would have been called with is looked at.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import motley_bench.commands
from motley.cli import app as cli
from motley.cli import fleet, serve
from motley.cli.fleet_arguments import read_bounds, read_setting
from motley.cli.numbers import (
    DAY_S,
    MAX_INTEGER,
    MAX_NUMBER,
    MAX_REPLICAS,
    MAX_TEMPERATURE,
    WEEK_S,
    WIDE_PARAMETERS,
    Between,
    check_numbers,
)
from motley.cluster.fleet.control.state.decisions import MAX_DRAIN_S
from motley.cluster.fleet.spec import service_spec, value_types
from motley.replicas import engine_config, sampling_params
from motley.replicas.errors import InvalidRequest

TEXTS = ("nan", "inf", "-inf", "1e300", "-1e300", str(2**63), str(2**64), "1" + "0" * 400)
TEXTS += ("-0.0", "-1", "0", "1e3", "0x10", "true", str(2**31), "5e-324")
LONG = "9" * 5000
YAML = (".nan", ".inf", "-.inf", "1.0e+300", str(2**64), "1" + "0" * 400, LONG, "1.5", "true", "-1", "'0x10'")


class Command:
    """One of ours with nothing in it: `called` has what it was given."""

    def __init__(self, path: tuple[str, ...], real: Callable[..., Any]) -> None:
        self.path, self.called = path, list[dict[str, Any]]()

        @functools.wraps(inspect.unwrap(real))
        def noted(*_: Any, **given: Any) -> None:
            self.called.append(given)

        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name=path[-1])(check_numbers(noted))
        self.built = typer.main.get_command(app)
        self.hints = typing.get_type_hints(inspect.unwrap(real), include_extras=True)
        self.signature = inspect.signature(noted)

    def numbers(self) -> Iterator[tuple[str, type, tuple[Any, ...]]]:
        for name, hint in self.hints.items():
            if hasattr(hint, "__metadata__") and name in self.signature.parameters:
                inner = str(hint.__origin__)
                if re.search(r"\b(int|float)\b", inner):
                    yield name, float if "float" in inner else int, hint.__metadata__

    def needed(self, but: str) -> list[str]:
        """Return arguments for the parameters without a default."""
        given = []
        for name, parameter in self.signature.parameters.items():
            if parameter.default is inspect.Parameter.empty and hasattr(self.hints[name], "__metadata__"):
                number = any(name == each for each, *_ in self.numbers())
                info = self.hints[name].__metadata__[0]
                option = isinstance(info, typer.models.OptionInfo)
                value = "1" if number else __file__ if info.exists else "x"
                given += [] if name == but else [f"--{name.replace('_', '-')}"] * option + [value]
        return given


def commands(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for info in app.registered_commands:
        assert info.callback is not None
        yield (*path, info.name or info.callback.__name__.strip("_").replace("_", "-")), info.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, (*path, str(group.name or group.typer_instance.info.name)))


def all_commands() -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    yield from commands(cli.app)
    yield from commands(motley_bench.commands.app, ("bench",))


COMMANDS = [Command(path, real) for path, real in all_commands()]
NUMBERS = [(command, *number) for command in COMMANDS for number in command.numbers()]
IDS = [".".join((*command.path, name)) for command, name, *_ in NUMBERS]


def test_all_commands_are_bounded() -> None:
    assert all(hasattr(real, "__wrapped__") for _, real in all_commands())
    assert {"serve.stall_s", "keys.new.days", "fleet.scale.replicas", "bench.serve.rate", "serve.threads"} <= set(IDS)


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Command, arguments: list[str]
) -> tuple[dict[str, Any] | None, str]:
    """Return what the command was called with, or None; and the one line that says why."""
    command.called.clear()
    monkeypatch.setattr(typer.main, "get_command", lambda _: command.built)
    status = cli.run(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert (status, len(lines)) == ((0, 0) if command.called else (2, 1)), (arguments, lines)
    return (command.called[0], "") if command.called else (None, lines[0])


def sensible(value: Any, kind: type, info: tuple[Any, ...], name: str) -> bool:
    """Return whether the value is of that type and within its bounds: below 0 only where its option says so."""
    least, maximum = bounds(kind, info, name)
    above = any(isinstance(each, Between) and each.above for each in info)
    return type(value) is kind and least <= value <= maximum and not (above and value == least)


def bounds(kind: type, info: Any, name: str) -> tuple[float, float]:
    if name in WIDE_PARAMETERS:
        return -(2**63), 2**63 - 1
    for each in info:
        if isinstance(each, Between):
            return each.minimum, each.maximum
    assert info[0].min is not None, "an option says what its least is"
    return info[0].min, min(
        math.inf if info[0].max is None else info[0].max, MAX_NUMBER if kind is float else MAX_INTEGER
    )


@pytest.mark.parametrize(("command", "name", "kind", "info"), NUMBERS, ids=IDS)
def test_a_number_is_right_or_refused_by_its_name(
    command: Command,
    name: str,
    kind: type,
    info: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argument = isinstance(info[0], typer.models.ArgumentInfo)
    flag = name.upper() if argument else f"--{name.replace('_', '-')}"

    def check(arguments: list[str], text: str) -> None:
        found, line = call(monkeypatch, capsys, command, [*command.needed(name), *arguments])
        if found is None:
            named = flag.strip("-").lower() in line.lower() or (argument and str(info[0].metavar) in line)
            assert named or (text == LONG and "not valid YAML" in line), line  # Python reads no such integer
            told = re.search(r"expected an? (number|integer) (?:between|above) (\S+)(?: and|, at most) (\S+)", line)
            own = [f"{each:g}" if kind is float else str(each) for each in bounds(kind, info, name)]
            assert told is None or list(told.groups()[1:]) == own, line
            return
        value = found[name]
        for one in value if isinstance(value, list) else [value]:
            assert sensible(one, kind, info, name), (arguments, one)
        assert text not in ("nan", "inf", "1e300", "0x10", "true", ".nan", ".inf", "1.0e+300"), (arguments, found)

    for text in TEXTS:
        check(["--", text] if argument else [f"{flag}={text}"], text)
    if argument or "config" not in command.signature.parameters:
        return
    file = tmp_path / "options.yaml"
    for text in YAML:
        file.write_text(f"{name.replace('_', '-')}: {text}\n")
        check(["--config", str(file)], text)


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", "9" * 400, "9" * 5000, "-1", "0x10", ""])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "--gpus", "T4=1", "--slo", "ttft={},tpot=0.1"], "--slo"),
        (["plan", "--gpus", "T4=1", "--slo", "ttft=1,tpot={}"], "--slo"),
        (["plan", "--slo", "ttft=3,tpot=0.1", "--gpus", "T4={}"], "--gpus"),
        (["serve", "--kv-memory={}"], "--kv-memory"),
        (["serve", "--swap-memory={}"], "--swap-memory"),
        (["serve", "--weights-memory={}"], "--weights-memory"),
        (["serve", "--weights-host-memory={}"], "--weights-host-memory"),
        (["serve", "--prefix-memory={}"], "--prefix-memory"),
        (["serve", "--pipeline-layers={}"], "pipeline.layers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_number_within_a_text(
    arguments: list[str], named: str, number: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.cluster.service.startup.serve_command.run_serve", None)
    assert cli.run([each.format(number) for each in arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert re.search(named, line), line


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["profile", "--batch=2147483647"], "motley profile: .*--batch"),
        (["profile", "--context-tokens=2147483647"], "motley profile: --context-tokens: 2147483647 and 1 more exceed"),
        (["profile", "--prompt-tokens=2147483647"], "motley profile: --prompt-tokens: 2147483647 and 1 more exceed"),
        (["generate", "-p=x", "--min-tokens=9", "--max-tokens=4"], "motley generate: --min-tokens: 9 is not accepted"),
        (["profile", "--kv-dtype=int3"], "motley profile: --kv-dtype: 'int3' is not accepted"),
        (["serve", "--max-running=9", "--max-batch-tokens=8"], "motley serve: --max-batch-tokens: 8 is not accepted"),
        (["serve", "--weights-host-memory=1GiB"], "motley serve: --weights-host-memory: 1073741824 is not accepted"),
        (["fit", "--pipeline-layers=0,1", "--pipeline-parallel=2"], "motley fit: --pipeline-layers: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_a_flag_becomes_is_refused_by_the_flag_before_anything_is_loaded(
    arguments: list[str], begins: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "motley.cluster.service.startup.serve_command.run_serve",
        "motley.replicas.profiling.profiler.build_engine",
    ):
        monkeypatch.setattr(name, None)
    assert cli.run(arguments) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert re.match(begins, line), line


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", "9" * 400, "9" * 5000, ""])
def test_numbers_for_the_control_plane(number: str) -> None:
    for read, text in (
        (read_bounds, f"cpu=0:{number}"),
        (read_bounds, f"cpu={number}:1"),
        (read_setting, f"a={number}"),
    ):
        with pytest.raises(typer.BadParameter, match=r"--bounds|--set"):
            read(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--watchdog-s=inf"], "--watchdog-s: inf is not accepted; expected a number above 0, at most 86400"),
        (["serve", "--watchdog-s=0"], "--watchdog-s: 0.0 is not accepted; expected a number above 0, at most 86400"),
        (["serve", "--max-running=1" + "0" * 20], "expected an integer between 1 and 2147483647"),
        (["serve", "--replicas=1" + "0" * 20], "10000"),
        (["serve", "--drain-s=inf"], "604800"),
        (["generate", "--top-p=nan"], "--top-p: nan is not accepted; expected a number above 0, at most 1"),
        (["generate", "--seed=1" + "0" * 20], f"expected an integer between {-(2**63)} and {2**63 - 1}"),
        (["fleet", "scale", "cpu", "1" + "0" * 20], "10000"),
        (["fleet", "policy", "queue", "--set", "settle_s=nan"], "--set settle_s: nan is not accepted; expected "
            "a number between 0 and 604800"),
        (["fleet", "policy", "queue", "--set", "running=0"], "expected a number between 0.0001 and 1e+09"),
        (["fleet", "policy", "--bounds", "cpu=0:1" + "0" * 20], "expected an integer between 0 and 10000"),
    ],
)  # fmt: skip
def test_the_bounds_that_are_told_are_the_options_own(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert told in line


def test_bounds_are_those_of_the_layers_below() -> None:
    assert (MAX_REPLICAS, MAX_TEMPERATURE, DAY_S) == (
        value_types.MAX_REPLICAS,
        sampling_params.MAX_TEMPERATURE,
        MAX_DRAIN_S,
    )
    assert Between(0.0, value_types.MAX_OBJECTIVE_S, above=True) == fleet.OBJECTIVE
    assert Between(0.0, engine_config.MAX_SECONDS, above=True) == serve.TIMEOUT
    for name, number in (("drain_s", WEEK_S), ("stall_s", WEEK_S)):
        assert service_spec.ServiceSpec.model_json_schema()["properties"][name]["maximum"] == number
    for field, refused in (("top_p", 0.0), ("top_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", 10.1)):
        with pytest.raises(InvalidRequest):
            sampling_params.SamplingParams(**{field: refused})
    assert sampling_params.SamplingParams(top_p=1.0, repetition_penalty=10.0)


@pytest.mark.parametrize("days", ["nan", "inf", "1e300", "-1", "0", "1e6", "9" * 400, "36501", "0x10"])
def test_days_of_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str) -> None:
    """Nothing is written."""
    assert cli.run(["keys", "new", "alice", "--file", str(tmp_path / "keys.yaml"), f"--days={days}"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "--days" in line
    assert list(tmp_path.iterdir()) == []
