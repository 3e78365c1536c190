"""`motley bench gpu` as far as it goes without a GPU: all its steps rehearsed, and what a bad kernel does to it."""

from __future__ import annotations

import itertools
import json
import tarfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice, LateOps

from motley.kernels.device.device_context import DeviceContext, interpreter_context
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.launch import config_tables
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.registry import OPERATIONS, find_operation
from motley.kernels.tuning import table_writer
from motley.replicas.execution.step_plan import StepPlan
from motley.replicas.gpu.decode_graphs import DecodeGraphs, GraphKey
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley_bench.engine import stream_measurement
from motley_bench.engine.stream_measurement import EngineMeasurement, StreamWorkload, WorkloadGroup
from motley_bench.gpu import ahead_compiler, gpu_divided_part, gpu_engine_check, gpu_kernel_parts, gpu_session
from motley_bench.gpu.gpu_kernel_order import REHEARSED
from motley_bench.gpu.gpu_kernel_targets import TARGETS, is_judged, judge, line
from motley_bench.processes import bench_schedule, task_process
from motley_bench.processes.bench_child import BenchChild, ChildEnded, ChildSilent
from motley_bench.processes.bench_schedule import BenchPart, BenchSchedule, BenchTurn, archived
from motley_bench.processes.task_process import TaskProcess

SUPPORT = Path(__file__).parents[1] / "support"
AMPLE_S = 36_000.0  # A busy machine must not run out of the time that the benchmark has on a lent card.


def results(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.thorough
def test_every_part_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton's interpreter, graphs and the overlap with the host on the stand-in for a device."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(gpu_session, "CHILD", "late_gpu_child")
    monkeypatch.setattr(stream_measurement, "CHILD", "late_engine_child")
    assert gpu_session.run(tmp_path, seconds=AMPLE_S, rehearse="9.0")
    found = results(tmp_path)
    assert found.keys() == {"machine", "summary", *gpu_session.PARTS}
    assert all(found[part]["complete"] and found[part]["rehearsal"] for part in gpu_session.PARTS)
    assert found["machine"]["machine"]["rehearsal"]
    assert all(reported["right"] and reported["seconds"] > 0 for reported in found["summary"]["parts"].values())
    assert found["summary"]["parts"].keys() == set(gpu_session.PARTS)
    checks = found["checks"]
    names = {row["op"] for row in checks["rows"]}
    assert names | checks["refused"].keys() == {operation.name for operation in OPERATIONS}
    assert all(row["error_of_allowed"] <= 1 for row in checks["rows"])
    assert checks["compiled_ahead"]["failed"] == 0
    assert found["engine"]["right"]
    assert found["engine"]["equal_to_fp32"] == found["engine"]["tokens"]
    assert found["engine"]["graphs_as_steps"] is True
    tuned = found["tuning"]["rows"]
    assert {row["op"] for row in tuned} == set(REHEARSED)
    assert all(row["result"]["found"] and not row["result"]["excluded"] for row in tuned)
    assert max(len(row["result"]["tried"]) for row in tuned) == gpu_kernel_parts.REHEARSED_CONFIGS
    assert not (tmp_path / "tuned").exists(), "a stand-in's times are no measurement"
    measured = {row["metric"].partition(" ")[0] for row in found["kernels"]["rows"]}
    assert {"attention_decode", "rms_norm"} <= measured
    assert {row["source"] for row in found["kernels"]["rows"]} == {"rehearsal"}
    assert len(found["kernels"]["targets"]) == len(TARGETS)
    divided = found["divided"]
    assert len(divided["rows"]) == len(gpu_divided_part._REHEARSED)
    assert all(row["right"] and {"old", "new"} <= row.keys() for row in divided["rows"])
    check_streams(found["streams"], tmp_path)


def check_streams(found: dict[str, Any], folder: Path) -> None:
    assert found["sides"].keys() == {"rehearsal motley", "rehearsal transformers"}
    streams, idle, maximum, *peers = found["found"]
    assert (streams["batch"], streams["tokens"], streams["complete"]) == (2, 12, True)
    assert streams["warmed"]["graphs"] > 0
    assert 0 < idle["between_steps"] < 1
    assert {path.suffix for path in (folder / "traces" / "rehearsal").iterdir()} == {".gz", ".svg"}
    assert maximum["skipped"] == "there is room for 0 streams of that length"
    assert [peer["variant"] for peer in peers] == ["prefill", "as it comes"]
    assert not any("error" in each for each in found["found"])
    assert {row["source"] for row in found["rows"]} == {"rehearsal"}
    assert all(goal["met"] is None for goal in found["goals"]), "a rehearsal shows nothing of a GPU"


def test_graphs_are_compared_padded_with_steps_that_prefill_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is full has no rows of padding to be wrong about; and a beginning that is known is not computed.

    With torch's operators: kernels in the interpreter take their time, and are rehearsed above.
    """
    launched: list[tuple[int, int]] = []
    prefilled: dict[GpuRunner, list[int]] = {}
    launch, eager = DecodeGraphs.launch, GpuRunner._launch_eager

    def graph(graphs: DecodeGraphs, key: GraphKey, items: Any, *more: Any) -> Any:
        launched.append((key.batch, len(items)))
        return launch(graphs, key, items, *more)

    def as_it_comes(runner: GpuRunner, plan: StepPlan) -> Any:
        if plan.num_tokens > len(plan.items):
            prefilled.setdefault(runner, []).append(plan.num_tokens)
        return eager(runner, plan)

    monkeypatch.setattr(DecodeGraphs, "launch", graph)
    monkeypatch.setattr(GpuRunner, "_launch_eager", as_it_comes)
    monkeypatch.setattr(gpu_engine_check, "GpuOps", lambda device_context: LateOps())
    found = gpu_engine_check.compare(interpreter_context((9, 0)), 2, LateDevice)
    assert found["graphs_as_steps"] is True
    assert found["right"]
    assert launched
    assert all(rows < batch for batch, rows in launched)
    with_graphs, steps = prefilled.values()
    assert with_graphs[-len(steps) :] == steps


def test_what_has_no_tensor_cores_is_rehearsed_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearses those operators alone that 9.0 refuses, or has other kernels for."""
    monkeypatch.setattr(gpu_kernel_parts, "REHEARSED_JOBS", 0)
    ops = [*(each.name for each in OPERATIONS if each.refusal(policy_of(9, 0))), "w8a8"]
    assert gpu_session.run(tmp_path, seconds=AMPLE_S, rehearse="7.0", ops=ops, parts=["checks"])
    checks = results(tmp_path)["checks"]
    assert {row["op"] for row in checks["rows"]} == set(ops)
    assert all(row["error_of_allowed"] <= 1 for row in checks["rows"])


def test_every_variant_of_a_kernel_is_checked_on_a_gpu() -> None:
    """Variants that are seldom launched are checked too, on any capability; and nothing is checked by its shape alone
    where it has words.
    """
    device_context = a_gpu()
    with TaskProcess("never_started") as process, ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(device_context, OPERATIONS, Path(), process, compilers)
    for each in OPERATIONS:
        if not each.refusal(device_context.policy):
            checked = {shape for _, shape, _ in plan._order.checks_of(each)}
            assert checked == {*each.small(device_context.policy), *each.samples(device_context.policy)}, each.name
    int4 = {shape for _, shape, _ in plan._order.checks_of(find_operation("w4a16_gemm"))}
    assert {(shape["group"], shape.get("scales", "fp16"), shape.get("bias", "")) for shape in int4} >= {
        (32, "fp32", "yes"), (64, "fp16", "yes"), (128, "bf16", "yes"), (128, "fp16", ""),
    }  # fmt: skip
    assert {shape.get("sums", None) for _, shape, _ in plan._order.checks_of(find_operation("quantize_rows_int8"))} == {
        None, 0, 32, 128,
    }  # fmt: skip


@pytest.mark.thorough
def test_a_bad_kernel_fails_the_run_and_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"rms_norm": "wrong", "rotary": "die", "silu_mul": "lose", "add_rms_norm": "hang"}
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(gpu_session, "CHILD", "faulty_gpu_child")
    monkeypatch.setattr(task_process, "TASK_S", 15.0)
    monkeypatch.setattr(gpu_kernel_parts, "REHEARSED_JOBS", 0)
    # A good one last: it has the process that came after all those.
    assert not gpu_session.run(
        tmp_path, seconds=AMPLE_S, rehearse="6.1", ops=[*faults, "quantize_rows_int8"], parts=["checks"]
    )
    checks = results(tmp_path)["checks"]
    assert {name.split()[0] for name in checks["failed"]} == faults.keys()
    by_op = {row["op"]: row for row in checks["rows"]}
    assert by_op["quantize_rows_int8"]["error_of_allowed"] <= 1
    assert by_op["rms_norm"]["error_of_allowed"] == 1.5
    assert "ended" in by_op["rotary"]["error"]
    assert "illegal memory access" in by_op["silu_mul"]["error"]
    assert "did not answer in time" in by_op["add_rms_norm"]["error"]


def test_what_time_did_not_reach_is_counted_and_the_run_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernel_parts, "REHEARSED_JOBS", 0)
    assert not gpu_session.run(tmp_path, seconds=1e-9, rehearse="6.1", ops=["silu_mul"])
    found = results(tmp_path)
    assert found["checks"]["unreached"] > 0
    assert not found["checks"]["complete"]
    assert found["checks"]["rows"] == []
    reported = found["summary"]["parts"]["checks"]
    assert (reported["right"], reported["unreached"]) == (False, found["checks"]["unreached"])


def test_a_part_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    seen: list[float] = []

    def fails(part: BenchPart, first: bool) -> bool:
        part.fields |= {"rows": [1], "unreached": 1}
        raise ZeroDivisionError("of a kernel")

    def works(part: BenchPart, first: bool) -> bool:
        assert json.loads((tmp_path / "summary.json").read_text())["not_reached"] == ["two"]
        seen.append(part.left())
        part.fields["complete"] = True
        return True

    parts = BenchSchedule(
        tmp_path, 100.0, [BenchTurn("one", 1.0), BenchTurn("two", 3.0), BenchTurn("one", 1.0)], {"rehearsal": True}
    )
    assert not parts.run({"one": fails, "two": works, "other": fails})
    [left] = seen
    assert 75 < left <= 77, "what the first did not need, and not all of the time: tasks may still be under way"
    found = results(tmp_path)
    assert found["one"]["rows"] == [1]
    assert "ZeroDivisionError: of a kernel" in found["one"]["error"]
    assert "in fails" in found["one"]["traceback"]
    assert found["summary"]["parts"]["two"]["complete"]
    assert parts.lines()[0].startswith("one: FAILED")


def test_a_part_that_was_cut_has_what_others_did_not_need(tmp_path: Path) -> None:
    """It goes on with what is left of it, in the turn it has and then in all the time there is."""
    turns: list[tuple[str, bool, int]] = []
    left = {"one": 3, "two": 1}

    def work(name: str, part: BenchPart, first: bool) -> bool:
        left[name] -= 1
        turns.append((name, first, round(part.left())))
        part.fields |= {"unreached": left[name], "complete": not left[name]}
        return not left[name]

    stages = [
        BenchTurn("one", 10.0, first=True),
        BenchTurn("two", 10.0, first=True),
        BenchTurn("one", 30.0),
        BenchTurn("two", 50.0),
    ]
    assert BenchSchedule(tmp_path, 100 / 0.96, stages, {}).run({name: partial(work, name) for name in left})
    assert turns == [("one", True, 10), ("two", True, 20), ("one", False, 50), ("one", False, 100)]
    assert results(tmp_path)["one"]["complete"]


LATE_S = 20.0


@pytest.mark.parametrize("late", [None, *range(len(gpu_session.STAGES))])
def test_no_turn_ends_after_eight_minutes_whichever_is_late(
    late: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what one takes too much is taken from all that follow, not from the next alone."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bench_schedule, "archived", lambda out: None)
    turns: list[tuple[float, float]] = []  # began, and was given

    def work(part: BenchPart, first: bool) -> bool:
        given = part.left()
        turns.append((clock[0] - 1000.0, given))
        clock[0] += max(given, 0.0) + (LATE_S if len(turns) - 1 == late else 0.0)
        part.fields["unreached"] = 1
        return True

    plan = BenchSchedule(tmp_path, gpu_session.SECONDS, gpu_session.STAGES, {})
    plan.run(dict.fromkeys(gpu_session.PARTS, work))
    assert len(turns) >= len(gpu_session.STAGES)
    assert all(began + given <= 480 or given <= 0 for began, given in turns)
    assert sum(max(given, 0.0) for _, given in turns) <= 480
    if late is None:
        return
    following = [(stage.weight, given) for stage, (_, given) in zip(gpu_session.STAGES, turns, strict=False)][
        late + 1 :
    ]
    rest = sum(weight for weight, _ in following)
    room = 480 * 0.96 * rest / sum(stage.weight for stage in gpu_session.STAGES) - LATE_S
    assert room <= 0 or all(given > weight / rest * room - 1e-6 for weight, given in following)


HANGS_S, RESPONSE_S, LOST_S = 440.0, 20.0, 1.0


@pytest.mark.parametrize("hangs", ["task", "start"])
@pytest.mark.parametrize("part", ["checks", "tuning", "kernels"])
def test_what_hangs_near_the_end_does_not_end_after_eight_minutes(
    part: str, hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task, or the process that is started after one that was lost."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    silent: list[str] = []
    results = {
        "check": {"error_of_allowed": 0.5},
        "memory": {"Triton read": 4e12},
        "tune": {"found": None},
        "measure": [],
    }

    class Hangs:
        def __init__(self, *_: str) -> None:
            self._do = "start"

        def __enter__(self) -> Hangs:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, line: dict[str, Any]) -> None:
            self._do = line["do"]

        def read(self, limit_s: float) -> dict[str, Any]:
            late = clock[0] >= 1000.0 + HANGS_S
            if late and (self._do == "start") is (hangs == "start"):
                silent.append(self._do)
                clock[0] += limit_s
                raise ChildSilent("did not answer in time")
            clock[0] += LOST_S if late else RESPONSE_S
            return {"usable": not late, "result": results.get(self._do)}

    monkeypatch.setattr(task_process, "BenchChild", Hangs)
    ops = [find_operation("w4a16_gemm"), find_operation("rms_norm")]
    with TaskProcess("never_started") as process, ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(a_gpu(), ops, tmp_path, process, compilers)
        monkeypatch.setattr(plan, "_compile_checked", lambda part, checks: None)
        monkeypatch.setattr(plan, "_compile_tuned", lambda part, first: None)
        BenchSchedule(tmp_path, gpu_session.SECONDS, [BenchTurn(part, 1.0)], {}).run({part: getattr(plan, part)})
    assert silent
    assert HANGS_S < clock[0] - 1000.0 <= gpu_session.SECONDS


def test_what_targets_and_goals_are_about_comes_first() -> None:
    """The first kernels are those of the model that the goals are about, a single token before more; none that is not
    judged

    before any that is. And no other turn has as much time as theirs.
    """
    with TaskProcess("never_started") as process, ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(a_gpu(), OPERATIONS, Path(), process, compilers)
        tuned, measured = plan._order.left_to_tune, plan._order.measured()
    large = {f"group=128 k={k} m={m} n={n}" for n, k in ((37_888, 3584), (3584, 18_944)) for m in (1, 2, 4, 8, 16)}
    int4 = tuned[find_operation("w4a16_gemm")]
    small = {f"group=128 k=3584 m=1 n={n}" for n in (4608, 3584)}
    assert {shape.key for shape in int4[:12]} == large | small
    assert [shape["m"] for shape in int4[:5]] == [1, 1, 1, 1, 2]
    attention = tuned[find_operation("attention_decode")][:12]
    assert all((shape["heads"], shape["dim"]) == (28, 128) for shape in attention)
    assert all(shape["context"] >= 2048 and shape["batch"] >= 8 for shape in attention)
    first = {shape.key for _, _, shape in measured[:24]}
    assert first == large | small | {shape.key for shape in attention}
    judged = [is_judged(each.name, dict(shape.fields)) for _, each, shape in measured]
    assert judged == sorted(judged, reverse=True)
    order = [stage.part for stage in gpu_session.STAGES if stage.first]
    assert order == ["checks", "tuning", "kernels", "streams"]
    time_of = dict.fromkeys((True, False), 0.0)
    for stage in gpu_session.STAGES:
        time_of[stage.first] += stage.weight if stage.part in order else 0.0
    assert time_of[True] > 7 * time_of[False]


def test_streams_that_were_cut_go_on_with_what_is_left_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = StreamWorkload(1, 8, 8), StreamWorkload(2, 8, 8)
    group = WorkloadGroup("rehearsal", "motley", (one, two), idle=(1,), until=0.5)
    measuring = EngineMeasurement("cpu", tmp_path, lambda share: -1.0)
    assert measuring.group(group) == group
    times = iter((9.0, 9.0, 9.0))  # it starts, and measures its first cell
    measuring.turn(lambda share: next(times, -1.0))
    monkeypatch.setattr(TaskProcess, "start", lambda process: None)
    ended = False
    monkeypatch.setattr(
        measuring,
        "_cell",
        lambda group, cell, process, left: [{"side": "motley", "batch": cell.batch, "complete": ended}],
    )
    monkeypatch.setattr(measuring, "_idle", lambda *of: [{"side": "motley", "what": "idle"}])
    left = measuring.group(group)
    assert left == replace(group, cells=(one, two), idle=(1,)), "the one that was cut off as well"
    assert len(measuring.found) == 1
    ended = True
    measuring.turn(lambda share: 9.0)
    assert measuring.group(left) is None
    assert [each.get("complete") for each in measuring.found] == [True, None, True], "in the place of what was cut off"
    assert measuring.complete


def rows(**changed: Any) -> list[dict[str, Any]]:
    """Two large layers and a small one at 1 token, and one attention."""
    sizes = [(37_888, 3584, 0.7), (4096, 14_336, 0.8), (4096, 4096, 0.4)]
    linears = [
        {
            "metric": "w4a16_gemv", "workload": {"case": f"linear {n} {k}", "m": 1, "n": n, "k": k, "group": 128},
            "peer": peer, "ratio": ratio, "of_memory_bandwidth": share,
        }
        for (n, k, share), (peer, ratio) in itertools.product(sizes, [("torch.matmul bf16", 3.2), ("int4pack_mm", 0.5)])
    ]  # fmt: skip
    attention = {
        "metric": "attention_decode", "workload": {"case": "attention", "batch": 8, "context": 2048},
        "peer": "torch SDPA", "ratio": 1.1, "of_memory_bandwidth": 0.75,
    }  # fmt: skip
    return [*linears, attention | changed]


PLANNED = [(row["metric"], row["workload"]) for row in rows() if row["peer"] != "int4pack_mm"]


def test_targets_are_judged_by_the_worst_case() -> None:
    assert all(each["met"] for each in judge(rows(), PLANNED))
    assert [(each["cases"], each["planned"]) for each in judge(rows(), PLANNED)] == [(2, 2), (1, 1), (2, 2), (1, 1)]
    part = judge(rows(), [*PLANNED, PLANNED[-1]])
    assert [each["met"] for each in part] == [True, True, True, False], "one that was not measured"
    assert "met so far" in line(part[3])
    worse = judge(rows(of_memory_bandwidth=0.69), PLANNED)
    assert [each["met"] for each in worse] == [True, True, True, False]
    assert worse[3]["worst_case"] == "attention"
    assert "MISSED" in line(worse[3])
    assert not any(each["met"] for each in judge([], PLANNED)), "what was not measured is not reached"
    assert "not measured" in line(judge([], PLANNED)[0])


def test_a_child_is_read_by_lines_and_ends_with_whatever_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talker.py").write_text(
        "import json, subprocess, sys\n"
        "grandchild = subprocess.Popen(['sleep', '600'])\n"
        "print('library noise')\n"
        "print(json.dumps({'pid': grandchild.pid}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    if json.loads(line) == 'end': sys.exit('last words')\n"
        "    print(line.strip(), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with BenchChild("talker") as child:
        pid = child.read(60)["pid"]
        child.write({"n": 1})
        child.write({"n": 2})
        assert [child.read(60), child.read(60)] == [{"n": 1}, {"n": 2}]
        with pytest.raises(ChildSilent):
            child.read(0.05)
        child.write("end")
        with pytest.raises(ChildEnded, match="last words"):
            child.read(60)
    until = time.monotonic() + 20
    while _lives(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_child_that_does_not_read_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds: to one that is at work, and to one that reads late but all."""
    (tmp_path / "busy.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "late.py").write_text(
        "import json, sys, time\ntime.sleep(0.3)\nprint(json.dumps({'chars': len(sys.stdin.readline())}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with BenchChild("busy") as child, pytest.raises(ChildSilent, match="busy of the measurement did not read in time"):
        child.write("x" * 2_000_000, 0.5)
    with BenchChild("late") as child:
        child.write("x" * 2_000_000, 60)
        assert child.read(60) == {"chars": 2_000_003}


def test_compilers_that_are_silent_are_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first list: the second has new ones. At the second as well: launches compile."""
    (tmp_path / "busy.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ahead_compiler, "AHEAD", "busy")
    monkeypatch.setattr(ahead_compiler, "WRITE_S", 0.2)
    with TaskProcess("never_started") as process, ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(a_gpu(), OPERATIONS, tmp_path, process, compilers)
        part = BenchPart(tmp_path / "checks.json", time.monotonic() + 0.2, {})
        plan._compile_checked(part, list(plan._order.checks_of(OPERATIONS[0])))
        assert "in time" in part.fields["compiled_ahead"]["error"]
        first = plan._compiler._ahead
        plan._compile_tuned(part, first=True)
        assert first is not None
        assert first._process.poll() is not None
        assert plan._compiler._ahead is None
    reported = part.fields["not_compiled_ahead"]
    assert reported["jobs"] > 1000
    assert "did not read in time" in reported["error"]


class Silent:
    """The process, when nothing comes back."""

    def begin(self) -> None: ...

    def ask(self, do: str, limit_s: float | None = None, **task: Any) -> dict[str, Any]:
        return {"result": {"Triton read": 4e12}} if do == "memory" else {"error": "did not answer in time"}

    def end(self) -> None: ...


def test_what_did_not_answer_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent: Any = Silent()
    device_context = interpreter_context((6, 1))
    parts = BenchSchedule(
        tmp_path, 100.0, [BenchTurn(name, 1.0) for name in gpu_session.PARTS if name not in ("divided", "streams")], {}
    )
    with ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(device_context, [find_operation("rms_norm")], tmp_path, silent, compilers)
        monkeypatch.setattr(plan, "_compile_checked", lambda part, checks: None)
        parts.run(
            {
                "checks": plan.checks, "tuning": plan.tuning, "kernels": plan.kernels,
                "engine": lambda part, first: gpu_session._engine(silent, device_context, part),
            }
        )  # fmt: skip
    found = results(tmp_path)
    assert [found[name]["complete"] for name in ("engine", "checks", "tuning", "kernels")] == [False] * 4
    assert found["engine"]["error"] == "did not answer in time"


@pytest.mark.parametrize(
    ("found", "complete"),
    [
        ({"complete": True}, True), ({"skipped": "there is room for 0 streams of that length"}, True),
        ({"complete": False}, False), ({"skipped": "no time was left", "late": True}, False), ({"error": ""}, False),
    ],
)  # fmt: skip
def test_streams_that_were_cut_off_are_not_complete(found: dict[str, Any], complete: bool, tmp_path: Path) -> None:
    measuring = EngineMeasurement("cpu", tmp_path, lambda share: 1.0)
    measuring.found = [{"side": "motley"}, {"side": "motley", **found}]
    assert measuring.complete is complete
    measuring.cut = [{}]
    assert not measuring.complete


def test_one_file_has_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.svg").write_text("<svg/>")
    for _ in range(2):
        path = archived(tmp_path)
    with tarfile.open(path) as archive:
        assert {each.name for each in archive if each.isfile()} == {"traces/a.svg"}
    BenchSchedule(tmp_path, 1.0, [BenchTurn("one", 1.0)], {}).run({"one": lambda part, first: True})
    with tarfile.open(path) as archive:
        assert {"one.json", "summary.json"} <= set(archive.getnames()), "as soon as a part has ended"


class Tuned:
    """The process, with a time for whatever it is to tune."""

    def __init__(self, microseconds: float, maximum: int) -> None:
        self._microseconds, self._left = microseconds, maximum

    def ask(self, do: str, limit_s: float | None = None, **task: Any) -> dict[str, Any]:
        if do in ("memory", "reread"):
            return {"result": {"Triton read": 4e12}}
        self._left -= 1
        shape = ProblemShape.parse(task["shape"])
        config = find_operation(task["op"]).configs(a_gpu().policy, shape)[0].to_json()
        return {"result": {"found": {"config": config, "microseconds": self._microseconds}, "excluded": []}}

    @property
    def over(self) -> bool:
        return self._left <= 0

    def end(self) -> None: ...


@pytest.mark.parametrize("triton", [None, "3.0.0"], ids=["the same", "of another Triton"])
def test_tables_of_earlier_runs_are_merged_shape_by_shape(
    triton: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run that reaches less changes what it reached, and no more."""
    folder = tmp_path / "tuned"
    monkeypatch.setattr(config_tables, "TUNED_FOLDER", folder)
    monkeypatch.setattr(table_writer, "_driver_version", lambda: "1")
    run_tuning(tmp_path / "first", monkeypatch, Tuned(1.0, 5))
    [path] = folder.rglob("*.json")
    if triton:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"triton": triton}))
    run_tuning(tmp_path / "second", monkeypatch, Tuned(2.0, 2))
    table = config_tables.read_table_file(path)
    assert table is not None
    assert table.about["triton"] != triton
    assert sorted(entry.facts["microseconds"] for entry in table.entries.values()) == [1.0] * 3 + [2.0] * 2
    of_others = [entry.facts["microseconds"] for entry in table.entries.values() if "measured_by" in entry.facts]
    assert of_others == ([1.0] * 3 if triton else []), "each says who has measured it, where the table does not"


def test_turns_go_through_all_there_is_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come at once: what targets are about comes first, then the rest, and nothing twice, as on a GPU."""
    requested: list[tuple[str, str, str]] = []

    class Answers(Tuned):
        def ask(self, do: str, limit_s: float | None = None, **task: Any) -> dict[str, Any]:
            requested.append((do, task.get("op", ""), task.get("shape", "")))
            if do == "check":
                return {"result": {"error_of_allowed": 0.5}}
            return {"result": []} if do == "measure" else super().ask(do, limit_s, **task)

        def begin(self) -> None: ...

    monkeypatch.setattr(config_tables, "TUNED_FOLDER", tmp_path / "tables")
    monkeypatch.setattr(table_writer, "_driver_version", lambda: "1")
    responses: Any = Answers(1.0, 0)
    ops = [find_operation("w4a16_gemm"), find_operation("attention_decode"), find_operation("rms_norm")]
    with ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(a_gpu(), ops, tmp_path, responses, compilers)
        monkeypatch.setattr(plan, "_compile_checked", lambda part, checks: None)
        monkeypatch.setattr(plan, "_compile_tuned", lambda part, first: None)
        stages = [stage for stage in gpu_session.STAGES if stage.part in ("checks", "tuning", "kernels")]
        assert BenchSchedule(tmp_path, 1000.0, stages, {}).run(
            {"checks": plan.checks, "tuning": plan.tuning, "kernels": plan.kernels}
        )
    assert all(results(tmp_path)[name]["complete"] for name in ("checks", "tuning", "kernels"))
    begun = list(dict.fromkeys(do for do, _, _ in requested))
    assert begun == ["check", "memory", "tune", "reread", "measure"]
    assert [op for do, op, _ in requested[: len(ops)]] == [each.name for each in ops]
    assert not any(plan._order.left_to_tune.values())
    for do in ("tune", "measure"):
        mine = [(op, shape) for each, op, shape in requested if each == do]
        assert len(mine) == len(set(mine)) > 200
        judged = [is_judged(op, dict(ProblemShape.parse(shape).fields)) for op, shape in mine]
        assert judged == sorted(judged, reverse=True)


def test_what_the_device_has_no_room_for_is_skipped_and_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a T4 the longest of the judged decode shapes: the first turn of tuning comes to them."""
    t4 = next(device for device in DEVICES if device.name == "Tesla T4")
    device_context, decode = (
        DeviceContext(torch.device("cuda:0"), policy_of(7, 5), t4),
        find_operation("attention_decode"),
    )
    requested: list[tuple[str, str]] = []

    class Answers(Tuned):
        def ask(self, do: str, limit_s: float | None = None, **task: Any) -> dict[str, Any]:
            requested.append((do, task.get("shape", "")))
            if do == "tune":
                shape = ProblemShape.parse(task["shape"])
                return {"result": {"found": {"config": decode.configs(device_context.policy, shape)[0].to_json()}}}
            return {"result": [] if do == "measure" else {"Triton read": 3e11}}

    monkeypatch.setattr(config_tables, "TUNED_FOLDER", tmp_path / "tables")
    monkeypatch.setattr(table_writer, "_driver_version", lambda: "1")
    responses: Any = Answers(1.0, 0)
    with ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(device_context, [decode], tmp_path, responses, compilers)
        monkeypatch.setattr(plan, "_compile_tuned", lambda part, first: None)
        stages = [stage for stage in gpu_session.STAGES if stage.part in ("tuning", "kernels")]
        parts = BenchSchedule(tmp_path, 1000.0, stages, {})
        assert parts.run({"tuning": plan.tuning, "kernels": plan.kernels}), "all was right"
    found = results(tmp_path)
    for name, do in (("tuning", "tune"), ("kernels", "measure")):
        skipped = found[name]["skipped"]
        assert found[name]["complete"] is True
        assert any("batch=64 context=32768" in each and "GiB" in each for each in skipped)
        assert found["summary"]["parts"][name]["skipped"] == skipped
        shapes = {shape for each, shape in requested if each == do}
        assert len(shapes) + len(skipped) == len(decode.shapes(device_context.policy))
        assert not any(shape in line for shape in shapes for line in skipped)
    assert "skipped, for want of memory" in parts.lines()[0]
    planned = {each["target"]: each["planned"] for each in found["kernels"]["targets"]}
    assert (
        0
        < max(planned.values())
        < sum(is_judged(decode.name, dict(s.fields)) for s in decode.shapes(device_context.policy))
    )


def test_where_the_installation_cannot_be_written_launches_look_in_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOTLEY_TUNED", "")  # and as it was afterwards
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(config_tables, "TUNED_FOLDER", tmp_path / "file")  # also root cannot make a folder in it
    monkeypatch.setattr(table_writer, "_driver_version", lambda: "1")
    config_tables.clear_table_cache()
    out = tmp_path / "out"
    run_tuning(out, monkeypatch, Tuned(1.0, 3))
    [path] = (out / "tuned").rglob("*.json")
    table = config_tables.read_table_file(path)
    assert table is not None
    assert f"launches look there with MOTLEY_TUNED={out / 'tuned'}" in capsys.readouterr().err
    rms_norm, device_context = find_operation("rms_norm"), a_gpu()
    found = config_tables.choose_config(
        rms_norm, device_context.policy, next(iter(table.entries)), device_context.about
    )
    assert found.how == f"measured: this shape in {path.parent}"
    config_tables.clear_table_cache()


def run_tuning(out: Path, monkeypatch: pytest.MonkeyPatch, process: Any) -> None:
    out.mkdir()
    monkeypatch.setattr(BenchPart, "over", property(lambda part: process.over))
    with ExitStack() as compilers:
        plan = gpu_kernel_parts.KernelParts(a_gpu(), [find_operation("rms_norm")], out, process, compilers)
        monkeypatch.setattr(plan, "_compile_tuned", lambda part, first: None)
        plan.tuning(BenchPart(out / "tuning.json", 1e9, {}))


def a_gpu() -> DeviceContext:
    """By its figures: nothing can be launched on it here."""
    return DeviceContext(
        torch.device("cuda:0"), policy_of(9, 0), next(d for d in DEVICES if d.capability.version == (9, 0))
    )


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
