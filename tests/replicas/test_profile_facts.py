"""Facts that a profile concludes from: clocks that leave the profiler out, facts of kernels, causes in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motley.kernels.canonical_weights import DenseWeight, GroupedWeight
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.model.parts.layer_source import FusedLinear
from motley.replicas.profiling import step_clock as clocks
from motley.replicas.profiling.call_work import CallWork
from motley.replicas.profiling.ceiling import Ceiling, CeilingFigure, cpu_ceiling, gpu_ceiling
from motley.replicas.profiling.findings import find_slow_modules
from motley.replicas.profiling.instruments import TimedModule
from motley.replicas.profiling.module_facts import ModuleFacts, module_facts
from motley.replicas.profiling.module_tree import ModuleNode
from motley.replicas.profiling.slow_causes import CAUSES, find_cause
from motley.replicas.profiling.stored_weights import StoredSize
from motley.replicas.profiling.time_recorder import LastCall, TimeRecorder

INT4 = {"kind": "linear", "stored_bits": 4.25, "held_bits": 4.5, "native": True, "activations": "bfloat16"}
GPU = {"kind": "linear", "stored_bits": 4.25, "held_bits": 4.25}

EXAMPLES: dict[str, dict[str, Any]] = {
    "half-precision accumulate": {
        "kind": "linear", "kernel": "torch.matmul fp16", "capability": CAPABILITIES[6, 1], "held_bits": 16.0,
        "stored_bits": 4.25,
    },
    "int4pack with activations": {**INT4, "native": False, "kernel": "torch-int4", "activations": "float32"},
    "oneDNN's int8 product was refused": {
        **INT4, "native": False, "kernel": "torch-dense", "held_bits": 16.0,
        "chosen": "torch-dense: torch's own product (before it: oneDNN's int8 product overflows on this CPU)",
    },
    "integer kernels were refused": {
        **INT4, "kernel": "c-dense", "held_bits": 16.0,
        "chosen": "c-dense: one order (before it: c-int4 rounds by 3%, above its bound of 1.6%)",
    },
    "weights written out": {**INT4, "kernel": "c-dense", "held_bits": 32.0},
    "no C kernels": {"kind": "norm", "kernel": "torch"},
    "the C kernel does not take this head_dim": {"kind": "attention", "kernel": "torch", "native": True},
    "kernel from the default table": {
        **GPU, "kernel": "w4a16_gemv", "capability": CAPABILITIES[8, 0], "configs": frozenset({"static", "default"}),
    },
    "kernel from a static table": {
        **GPU, "kernel": "w4a16_gemv", "capability": CAPABILITIES[8, 0], "configs": frozenset({"static"}),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "facts"), EXAMPLES.items(), ids=EXAMPLES)
def test_each_cause_is_told_by_its_facts(name: str, facts: dict[str, Any]) -> None:
    cause = find_cause(ModuleFacts(**facts))
    assert cause is not None
    assert cause.name.startswith(name)
    assert (
        find_cause(ModuleFacts(**facts), typical=ModuleFacts(**facts)) is None
    )  # what holds of siblings too explains nothing


@pytest.mark.parametrize(
    "refused",
    ["onednn-int8 rounds by 2%, above its bound of 1.6%", "int8 would change the weights by 3%, above its bound of 2%"],
)
def test_without_a_compiler_rounding_is_not_what_is_to_blame(refused: str) -> None:
    """The C kernels would hold the weights as they are stored."""
    chosen = f"torch-dense: torch's own product (before it: no C kernels; {refused})"
    cause = find_cause(
        ModuleFacts(**{**INT4, "native": False, "kernel": "torch-dense", "held_bits": 16.0, "chosen": chosen})
    )
    assert cause is not None
    assert "install a C compiler" in cause.remedy


def test_the_examples_are_all_causes_in_their_order() -> None:
    assert [cause.name.startswith(name) for cause, name in zip(CAUSES, EXAMPLES, strict=True)] == [True] * len(CAUSES)


@pytest.mark.parametrize(
    "facts",
    [
        {**INT4, "kernel": "c-int4"},
        {**INT4, "kernel": "torch-int4"},
        {**INT4, "kernel": "c-int8", "held_bits": 8.3},
        {"kind": "linear", "kernel": "c-dense", "stored_bits": 16.0, "held_bits": 16.0, "native": True},
        {"kind": "linear", "kernel": "torch.matmul fp16", "capability": CAPABILITIES[6, 0], "stored_bits": 16.0},
        {"kind": "linear", "kernel": "torch.matmul fp32", "capability": CAPABILITIES[6, 1], "stored_bits": 16.0},
        {**GPU, "kernel": "w4a16_gemv", "capability": CAPABILITIES[9, 0], "configs": frozenset({"measured"})},
        {"kind": "lookup", "kernel": "torch"},
    ],
)
def test_what_is_as_it_should_be_has_no_cause(facts: dict[str, Any]) -> None:
    assert find_cause(ModuleFacts(**facts)) is None


def test_what_the_profiler_does_is_in_no_time() -> None:
    now = 0.0

    def tick(seconds: float) -> None:
        nonlocal now
        now += seconds

    def count(args: Any, result: Any) -> CallWork:
        tick(100.0)  # however slow counting is
        return CallWork(7, 5, 3)

    def compute(x: torch.Tensor) -> torch.Tensor:
        tick(2.0)
        return x

    recorder = TimeRecorder(clocks.HostClock(lambda: now))
    part = recorder.around("part", compute, count)
    began = recorder.clock.mark()
    for _ in range(3):
        part(torch.zeros(4))
        tick(0.5)
    recorder.add("step", began, recorder.clock.mark())
    sample = recorder.take()
    assert sample.seconds == {"part": 6.0, "step": 7.5}
    assert sample.work["part"] == CallWork(21, 15, 9)
    assert recorder.take().seconds == {}


class Stream:
    """A GPU's, beside a host that is given times: what it is given begins when all before has ended, no sooner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycles_per_s: float = 2e9) -> None:
        self.host_s = self.device_s = 0.0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                stream.launch(1e-6, 0.0)
                self.at = stream.device_s

            def query(self) -> bool:
                return stream.host_s >= self.at

            def elapsed_time(self, end: Event) -> float:
                assert stream.host_s >= end.at, "events have no time before the device has passed them"
                return 1000.0 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.wait())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(3e-6, cycles / cycles_per_s))

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


@pytest.mark.parametrize("launching", [50e-6, 5e-3])
def test_on_a_gpu_a_kernels_time_is_its_own_however_long_the_host_takes_to_launch_it(
    launching: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, kernel = Stream(monkeypatch), 4e-6
    recorder = TimeRecorder(clocks.open_clock(torch.device("cuda")))

    def layer(x: torch.Tensor) -> torch.Tensor:
        stream.launch(launching, kernel)
        stream.launch(launching, kernel)
        return x

    part = recorder.around("part", layer, lambda *_: CallWork())

    def step() -> dict[str, float]:
        """Three in a whole, with something between them."""
        recorder.clock.settle()
        recorder.clock.hold()
        began = recorder.clock.mark()
        for _ in range(3):
            part(torch.zeros(1))
            stream.launch(launching, 1e-6)
        recorder.add("step", began, recorder.clock.mark())
        return recorder.take().seconds

    stamps = [step() for _ in range(8)]  # the first ones find that holds are too short for a host that slow
    assert stamps[-1] == pytest.approx({"part": 6 * kernel, "step": 3 * (2 * kernel + 1e-6)})
    began = recorder.clock.mark()
    layer(torch.zeros(1))
    recorder.add("not held", began, recorder.clock.mark())
    assert recorder.take().seconds["not held"] >= launching, "as it would be else"


def grouped(rows: int, columns: int, bits: int) -> GroupedWeight:
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    scales, zeros = torch.ones(rows, columns // 128, dtype=torch.float16), torch.zeros(rows, columns // 128)
    return GroupedWeight(codes, scales, zeros.to(torch.uint8), bits, 128)


def test_on_a_gpus_operators_facts_are_those_of_tables_and_policy() -> None:
    """Looked up as launches look them up; nothing is launched."""
    ops = GpuOps(interpreter_context((7, 5)))
    half = LastCall(torch.float16, 1)

    def facts(name: str, kind: Any, linear: Any = None) -> ModuleFacts:
        stored = None if linear is None else StoredSize(256 * 256 // 2, 256 * 256)
        return module_facts(TimedModule(name, kind, linear, stored), half, ops)

    down = facts("layers.0.mlp.down", "linear", FusedLinear([ops.linear(grouped(256, 256, 4))]))
    assert (down.kernel, down.configs) == ("w4a16_gemv", frozenset({"static"}))
    assert (down.capability, down.activations, down.stored_bits) == (CAPABILITIES[7, 5], "float16", 4.0)
    assert down.arithmetic == "tensor-fp16"  # decode has fp32 alone, but prefill more
    assert find_cause(down, typical=down) is None
    eight = facts("layers.0.mlp.down", "linear", ops.linear(grouped(256, 256, 8)))
    assert (eight.kernel, eight.configs) == ("w8a8", frozenset())  # never launched, so nothing was looked up
    assert eight.arithmetic == "tensor-fp16"
    ops.configs.of("w8a8_dequantize", m=2048, n=256, k=256, group=128, zeros="yes")
    many = module_facts(
        TimedModule("down", "linear", ops.linear(grouped(256, 256, 8)), None), LastCall(torch.float16, 2048), ops
    )
    assert many.configs == frozenset({"static"})
    ops.configs.of("silu_mul", n=256, t=4)
    assert facts("layers.0.mlp.silu_mul", "activation").configs == frozenset()  # that was of other steps
    ops.configs.of("silu_mul", n=256, t=1)
    assert facts("layers.0.mlp.silu_mul", "activation").configs == frozenset({"static"})
    ops.configs.of("attention_decode", batch=1, context=16, heads=3, kv_heads=1, dim=64, window=0, kv="fp16")
    odd = facts("layers.0.attention.paged_attention", "attention")
    assert odd.configs == frozenset({"default"})  # no table has three heads to one
    found = find_cause(odd)
    assert found is not None
    assert found.name.startswith("kernel from the default table")
    odd_shape = facts("layers.0.attention.o", "linear", ops.linear(grouped(256, 384, 4)))
    assert odd_shape.kernel == "w4a16_gemv"
    head = facts("head", "linear", ops.linear(DenseWeight(torch.zeros(512, 256)), role="head"))
    assert head.kernel == "torch.matmul fp16"
    assert {down.arithmetic, eight.arithmetic, odd.arithmetic, head.arithmetic} <= gpu_ceiling(
        ops.device_context
    ).rates.keys()
    assert gpu_ceiling(ops.device_context).source == "table"


def ceiling(**rates: float) -> Ceiling:
    figures = {name: CeilingFigure(rate, "measured", "") for name, rate in rates.items()}
    return Ceiling("a device", CeilingFigure(100.0, "measured", ""), figures)


def test_the_least_time_is_that_of_what_takes_longer() -> None:
    roofline = ceiling(fp32=10.0, bf16=40.0)
    assert roofline.roofline_time(CallWork(999, 20, 100), "fp32").seconds == 2.0
    assert roofline.roofline_time(CallWork(999, 20, 100), "fp32").bound_by == "fp32"
    assert (
        roofline.roofline_time(CallWork(999, 20, 100), "bf16").bound_by == "bandwidth"
    )  # 100 needed, whatever is moved
    assert roofline.roofline_time(CallWork(999, 80, 100), "int8").bound_by == "bf16"  # the fastest there is


def test_the_ceiling_of_this_cpu_is_measured() -> None:
    found = cpu_ceiling(2**20, 1)
    assert {figure.source for figure in (found.bandwidth, *found.rates.values())} == {"measured"}
    assert {"fp32", "bf16"} <= found.rates.keys()
    assert all(figure.value > 0 for figure in found.rates.values())


def layer(index: int, seconds: float, operations: int = 100) -> ModuleNode:
    name = f"layers.{index}.mlp.down"
    facts = ModuleFacts(**INT4, kernel="c-int4")
    return ModuleNode("down", name, [seconds] * 5, seconds, CallWork(10, operations, 10), None, facts)


def step(*layers: ModuleNode) -> ModuleNode:
    return ModuleNode("step", "step", [1.0] * 5, 1.0, children=list(layers))


def test_siblings_are_compared_by_operation_and_by_their_fastest_step() -> None:
    """A window makes a layer's work less; noise makes some of its steps slow."""
    longer = layer(3, 0.4, operations=400)
    noisy = layer(2, 0.1)
    noisy.samples = [0.1, 0.1, 9.0, 9.0, 0.1]
    assert find_slow_modules(step(layer(0, 0.1), layer(1, 0.1), noisy, longer)) == []
    told = find_slow_modules(step(layer(0, 0.1), layer(1, 0.1), layer(2, 0.1), layer(3, 0.4), layer(4, 0.4)))
    assert [(each.layers, each.factor, each.cause) for each in told] == [
        ("3–4", pytest.approx(4.0), "none that is known: kernel, dtypes and configs are its siblings'")
    ]
    assert told[0].share == pytest.approx(0.8)
    assert told[0].text.startswith(
        "mlp.down of layers 3–4 (c-int4) takes 4 times what its siblings in other layers take: 80.0%"
    )
