"""The command line in this process: help, results, and errors in one line with the right status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import service_checkpoint
import torch

from motley import Engine, SamplingParams
from motley.cli import serve as serve_module
from motley.cli.app import app, run
from motley.cli.options import parse_size
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.service.startup import serve_command as service
from motley_bench.engine import engine_gpu_streams
from motley_bench.engine import engine_throughput as bench

COMMANDS = [
    ["serve"],
    ["generate"],
    ["chat"],
    ["doctor"],
    ["fit"],
    ["plan"],
    ["profile"],
    ["bench", "engine"],
    ["bench", "serve"],
    ["bench", "service"],
    ["bench", "kernels"],
    ["bench", "routing"],
    ["bench", "gpu"],
    ["kernels", "compile"],
    ["kernels", "tune"],
    ["kernels", "list"],
]
FLEET = ("status", "watch", "scale", "policy", "drain", "roll", "metrics")
WITHOUT_SETTINGS = [["keys", "new"], ["keys", "list"], ["keys", "revoke"], *(["fleet", name] for name in FLEET)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_checkpoint.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", COMMANDS + WITHOUT_SETTINGS, ids=" ".join)
def test_every_command_has_help_with_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:\n    motley " + " ".join(command) in shown
    assert ("--config FILE" in shown) is (command in COMMANDS)


def test_the_list_above_is_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert {command[0] for command in COMMANDS + WITHOUT_SETTINGS} == {
        *(command.callback.__name__ for command in app.registered_commands if command.callback),
        *(group.name for group in app.registered_groups),
    }
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command[0]} " in shown for command in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from motley.cli.app import run; run(['serve', '--help']); "
        "print([name for name in ('torch', 'ray', 'transformers', 'grpc', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines()[-1] == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("motley 0.")


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["serve", "--nope"], 2, "--nope"),
        (["serve", "--http-port", "x"], 2, "--http-port"),
        (["serve", "--http-port", "70000"], 2, "--http-port"),
        (["serve", "--kv-memory", "much"], 2, "--kv-memory: 'much' is no size; expected one such as 512MiB"),
        (["serve", "--pipeline-layers", "6;18"], 2, "--pipeline-layers: '6;18' is not accepted; expected numbers such"),
        (
            ["serve", "--pipeline-layers", "6,18"],
            2,
            "(6, 18) is not accepted; expected a positive integer for each of 1",
        ),
        (["serve", "--swap-memory", "0MiB"], 2, "--swap-memory: '0MiB' is no size; expected one such as 512MiB"),
        (["serve", "--dtype", "float17"], 2, "dtype: 'float17' is not accepted; expected 'auto' or"),
        (["generate", "demo"], 2, "give --prompt TEXT"),
        (["generate", "demo", "--prompt-file", "/no/such"], 2, "--prompt-file /no/such cannot be read"),
        (["generate", "/no/such", "-p", "x"], 1, "/no/such: there is no such folder"),
        (["generate", "demo", "-p", "x", "--temperature", "-1"], 2, "temperature: -1.0 is not accepted"),
        (["generate", "demo", "-p", "x", "--config", "/no/such.yaml"], 2, "/no/such.yaml cannot be read"),
        (["profile", "/no/such"], 1, "/no/such: there is no such folder"),
        (["profile", "--batch", "0"], 2, "--batch"),
        (["profile", "--device", "cuda:x"], 2, "device: 'cuda:x' is none; expected cpu or cuda[:i]"),
        (["profile", "--kv-dtype", "int4"], 2, "--kv-dtype: 'int4' is not accepted; expected None or 'int8'"),
        (["profile", "--html", "/no/such/page.html"], 2, "--html /no/such/page.html cannot be written: No such file"),
        (["chat", "--target", "127.0.0.1:1", "hi"], 1, "start one with `motley serve`"),
        (["chat", "--address", "127.0.0.1:1", "hi"], 1, "or give its --address"),
        (["fleet", "status", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1: give an admin's key"),
        (["chat", "--ca", "/no/such.pem", "hi"], 2, "--ca"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    assert says in one_line(capsys)


def test_errors_of_the_model_are_told_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tmp_path), "-p", "x"]) == 1
    assert "config.json" in one_line(capsys)
    assert run(["generate", str(model), "-p", "x", "--device", "cuda:9"]) == 2
    assert "device" in one_line(capsys)
    assert run(["generate", str(model), "-p", "x" * 5000]) == 2
    one_line(capsys)


def test_generate_prints_what_the_engine_gives(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Engine(model).generate("abc", SamplingParams(temperature=0.0, max_tokens=9))[0]
    assert run(["generate", str(model), "-p", "abc", "--max-tokens", "9", "--temperature", "0", "--stats"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected.text + "\n"
    assert "9 tokens in " in shown.err
    assert (
        run(["generate", str(model), "-p", "abc", "-p", "d", "--max-tokens", "9", "--temperature", "0", "--json"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["outputs"][0]["text"] == expected.text
    assert result["outputs"][0]["token_ids"] == expected.token_ids
    assert len(result["outputs"]) == 2
    assert result["choices"]["dtype"]


def test_profile_prints_json_and_writes_the_page(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompt-tokens", "16", "--context-tokens", "8", "--batch", "2", "--steps", "1", "--repeats", "1"]
    page = tmp_path / "page.html"
    assert run(["profile", str(model), *sizes, "--threads", "1", "--json", "--html", str(page)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bench"], report["about"]["device"], report["about"]["threads"]) == ("profile", "cpu", "1")
    assert report["roofline"]["bandwidth"]["source"] == "measured"
    assert {row["workload"]["phase"] for row in report["rows"]} == {"prefill", "decode"}
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert run(["profile", str(model), "--prompt-tokens", "9999"]) == 2
    assert "--prompt-tokens: 9999 and 1 more exceed the context of" in one_line(capsys)


def test_generate_reads_stdin_and_files_and_chats(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prompt_tokens(*arguments: str) -> int:
        assert run(["generate", str(model), *arguments, "--max-tokens", "1", "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)["outputs"][0]["prompt_tokens"])

    (tmp_path / "prompt.txt").write_text("12345")
    assert prompt_tokens("--prompt-file", str(tmp_path / "prompt.txt")) == 5
    monkeypatch.setattr(sys, "stdin", io.StringIO("1234567"))
    assert prompt_tokens() == 7
    assert prompt_tokens("-p", "123", "--chat", "--system", "4") > 20
    assert run(["generate", str(model), "-p", "x", "--system", "y"]) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "max-tokens: 3\nprompt: [abc]\n"),
        ("a.yml", "generate: {max_tokens: 3, prompt: [abc]}\nserve: {http-port: 1}\n"),
        ("a.toml", 'max-tokens = 3\nprompt = ["abc"]\n'),
        ("a.json", '{"max-tokens": 3, "prompt": ["abc"]}'),
    ],
)
def test_flags_win_over_the_file_and_the_file_over_defaults(
    name: str, text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    arguments = ["generate", str(model), "--json", "--ignore-eos", "--config", str(tmp_path / name)]
    for flags, expected in ([], 3), (["--max-tokens", "2"], 2):
        assert run([*arguments, *flags]) == 0
        assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == expected


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "max-tokns: 3", "'max-tokns' is not an option here; there are"),
        ("a.yaml", "[1, 2]", "holds no options"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.toml", "a = ", "not valid TOML"),
        ("a.ini", "a = 1", "ending in .yaml"),
        ("a.yaml", "max-tokens: many", "max-tokens"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(
    name: str, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert run(["generate", "demo", "-p", "x", "--config", str(tmp_path / name)]) == 2
    assert says in one_line(capsys)


def test_serve_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(service, "run_serve", lambda options, bar: (seen.append(options), 3)[1])
    lines = [
        "http-port: 8080",
        "grpc-port: 9090",
        "kv-memory: 1GiB",
        "swap-memory: 0",
        "threads: 2",
        "weights-memory: 3GiB",
    ]
    (tmp_path / "serve.yaml").write_text("\n".join(lines))
    status = run(["serve", "some/model", "--config", str(tmp_path / "serve.yaml"), "--http-port", "8081", "--greet"])
    assert status == 3
    (options,) = seen
    assert (options.model, options.http_port, options.grpc_port, options.greet) == ("some/model", 8081, 9090, True)
    assert (options.engine.kv_memory_bytes, options.engine.threads) == (2**30, 2)
    assert (options.engine.swap_memory_bytes, options.engine.weights_memory_bytes) == (0, 3 * 2**30)
    assert run(["serve"]) == 3
    assert seen[1] == ServeOptions()
    assert run(["serve", "--tensor-parallel", "2", "--pipeline-parallel", "2", "--pipeline-layers", "6,18"]) == 3
    engine = seen[2].engine
    assert (engine.tensor_parallel, engine.pipeline_parallel, engine.pipeline_layers) == (2, 2, (6, 18))


def test_serve_flags_cover_the_options() -> None:
    """A new option of the service needs a flag."""
    flags = set(serve_module.serve.__annotations__)
    repeatable = {"cors_origins": "cors_origin", "weights_roots": "weights_root"}  # named for one value
    assert {repeatable.get(name, name) for name in ServeOptions.__dataclass_fields__} - {"engine", "fleet"} <= flags


def test_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "run", lambda **given: (seen.append(given), {"bench": "engine", "rows": []})[1])
    call = "bench engine --shape tiny --batch 1 8 32 --peer transformers --peer llama.cpp --threads 2 --json"
    assert run(call.split()) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "engine"
    assert (seen[0]["shape"], seen[0]["batches"], seen[0]["threads"]) == ("tiny", [1, 8, 32], 2)
    assert seen[0]["peers"] == ["transformers", "llama.cpp"]
    assert run(["bench", "engine"]) == 0
    assert seen[1]["batches"] == [1, 8, 32]
    assert run(["bench", "engine", "--batch", "0"]) == 2


def test_bench_on_a_gpu_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        engine_gpu_streams, "run", lambda **given: (seen.append(given), {"bench": "engine", "rows": []})[1]
    )
    assert run(["bench", "engine", "--device", "cuda:1", "--json"]) == 0
    assert (seen[0]["device"], seen[0]["shapes"]) == ("cuda:1", ["qwen2.5-7b", "llama-3-8b", "qwen3-0.6b"])
    assert (seen[0]["batches"], seen[0]["lengths"]) == (engine_gpu_streams.BATCHES, engine_gpu_streams.LENGTHS)
    call = "bench engine --device cuda --shape qwen3-0.6b --batch 1 64 --prompt-tokens 100 --seconds 9 --json"
    assert run(call.split()) == 0
    assert (seen[1]["shapes"], seen[1]["batches"], seen[1]["lengths"]) == (["qwen3-0.6b"], [1, 64], [(100, 128)])
    assert seen[1]["seconds"] == 9
    assert seen[1]["speculate_ngram"] == 0
    assert run(["bench", "engine", "--device", "cuda", "--speculate-ngram", "6", "--json"]) == 0
    assert seen[2]["speculate_ngram"] == 6
    assert run(["bench", "engine", "--device", "cuda", "--quick"]) == 2
    assert run(["bench", "engine", "--seconds", "9"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_without_the_gpu_that_is_asked_for_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "engine", "--device", "cuda"]) == 1
    assert "device: there is no CUDA device that torch can use" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("flag", "value"), [("--shape", "huge"), ("--peer", "other")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bench_refuses_by_name(flag: str, value: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "engine", "--device", device, flag, value]) == 2
    assert f"{flag}: '{value}' is not known" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["load", "tiers"])
def test_bench_says_what_it_cannot_do(bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--shape", "--format"):
        assert run(["bench", bench, flag, "huge"]) == 2
        assert f"{flag}: 'huge' is not known" in capsys.readouterr().err
    assert run(["bench", bench, "--shape", "tiny", "--folder", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_bench_tiers_says_what_memory_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested = ["--shape", "tiny", "--format", "gptq-int4", "--share", "0.01", "--folder", str(tmp_path)]
    assert run(["bench", "tiers", *requested]) == 1
    assert "weights_memory_bytes" in (said := capsys.readouterr().err)
    assert "Traceback" not in said


def test_doctor_says_what_is_chosen_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    facts: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["facts"]
    named = {(fact["section"], fact["name"]): fact for fact in facts}
    assert named["Versions", "torch"]["value"]
    assert "GiB" in named["Machine", "memory"]["value"]
    chosen = {name: fact["value"] for (section, name), fact in named.items() if "bfloat16" in section}
    assert ": " in chosen["activations"]
    assert {"layer, int4 g128", "head, int4 g128", "head, bfloat16"} <= chosen.keys()
    assert all(fact["remedy"] for fact in facts if fact["status"] == "missing")
    assert run(["doctor"]) == 0
    assert "Versions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("2GiB", 2**31), ("1.5k", 1500), ("512 MiB", 2**29), ("3MB", 3_000_000), ("4g", 4 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


def test_a_reader_that_leaves_early_is_no_crash() -> None:
    code = "import sys; from motley.cli.app import run; sys.exit(run(['doctor', '--json']))"
    script = f'{sys.executable} -c "{code}" | true'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr


def test_a_file_gives_one_value_or_several_and_no_switch_for_a_number(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("prompt: abc\nstop: zzz\nmax-tokens: 2\nignore-eos: true\n")
    assert run(["generate", str(model), "--json", "--config", str(file)]) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 1
    file.write_text("prompt: abc\nmax-tokens: true\n")
    assert run(["generate", str(model), "--config", str(file)]) == 2
    assert "max-tokens: true is not accepted" in one_line(capsys)
