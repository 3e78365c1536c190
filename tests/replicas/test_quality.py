"""Quality that the CPU kernels cost the demo model: the divergence from fp32 on held-out text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_model.plain_model import load_plain
from safetensors.torch import load_file, save_file
from thorough import thorough
from tiny_checkpoints import rewrite_config
from tokenizers import Tokenizer

from motley.kernels import ops
from motley.kernels.cpu import cpu_ops as cpu
from motley.kernels.cpu.c_kernels.native_kernels import load_native_kernels
from motley.kernels.cpu.layers import linear_choice as cpu_choice
from motley.kernels.cpu.layers.native_linear import NativeDenseLinear, build_as_stored, build_int8
from motley.kernels.cpu.layers.rounding_probe import ROUNDING_BOUND, rounding_error
from motley.kernels.cpu.layers.torch_linear import TorchDenseLinear, TorchInt4Linear, TorchInt8Linear, _int8_refusal
from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.quantization.gptq_writer import GPTQSettings, pack_checkpoint, round_to_nearest

NUM_TOKENS = 512
KL_BOUND = 0.002  # nats per token against the same weights in fp32, for whatever is chosen
BF16_KL = 0.0004  # of bf16 activations alone
KL_PER_SQUARE = 10.0  # KL above that, at most, by the square of the rounding error that the choice measures
needs_native = pytest.mark.skipif(load_native_kernels()[0] is None, reason=load_native_kernels()[1])
needs_onednn = pytest.mark.skipif(bool(_int8_refusal()), reason=_int8_refusal() or "-")

Divergence = Callable[..., float]


@pytest.fixture(scope="module")
def held_out() -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    ids = tokenizer.encode((demo_path() / "heldout.txt").read_text(encoding="utf-8")).ids
    assert len(ids) >= NUM_TOKENS
    return ids[:NUM_TOKENS]


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_plain(demo_path())


@pytest.fixture(scope="module")
def reference(held_out: list[int], plain: Any) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] by transformers in fp32."""
    with torch.no_grad():
        return torch.log_softmax(plain(torch.tensor([held_out])).logits[0], dim=-1)


@pytest.fixture(scope="module")
def divergence(held_out: list[int], reference: torch.Tensor) -> Divergence:
    """KL(fp32 || the engine's), nats per token."""

    def of(engine: Engine) -> float:
        logprobs = torch.log_softmax(engine.logits(held_out), dim=-1)
        return float((reference.exp() * (reference - logprobs)).sum(-1).mean())

    return of


@pytest.fixture(scope="module", params=[64, -1], ids=["g64", "row"])
def int8_folder(request: pytest.FixtureRequest, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its layers rounded to 8 bits, as GPTQ stores them."""
    folder = Path(shutil.copytree(demo_path(), tmp_path_factory.mktemp("int8") / "model"))
    settings = GPTQSettings(bits=8, group_size=request.param)
    old = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".qweight") for name in old if name.endswith(".qweight")]
    tensors = {name: tensor for name, tensor in old.items() if name.rpartition(".")[0] not in names}
    state = plain.state_dict()
    for name in names:
        for part, tensor in pack_checkpoint(round_to_nearest(state[f"{name}.weight"], settings), settings).items():
            tensors[f"{name}.{part}"] = tensor
        if f"{name}.bias" in old:
            tensors[f"{name}.bias"] = old[f"{name}.bias"]
    save_file(tensors, folder / "model.safetensors")
    rewrite_config(folder, lambda config: config.update(quantization_config=settings.describe()))
    return folder


def kernels(engine: Engine) -> str:
    """Return the kernels of the layers, most chosen first."""
    whys = next(why for what, why in engine.choices.items() if what.startswith("layer"))
    return " and ".join(why.split(":")[0] for why in whys.split(" | "))


@pytest.mark.parametrize(
    ("dtype", "settings", "bound"),
    [
        ("float32", {}, 1e-7),
        ("float32", {"cpu_weights": "int4"}, KL_BOUND),
        ("bfloat16", {}, KL_BOUND),
        ("bfloat16", {"cpu_weights": "int4"}, KL_BOUND),
        ("bfloat16", {"cpu_weights": "int8"}, KL_BOUND),
    ],
    ids=["fp32", "fp32-int4", "bf16-auto", "bf16-int4", "bf16-int8"],
)
def test_what_is_chosen(
    dtype: str, settings: dict[str, str], bound: float, divergence: Divergence, report: Callable[[str], None]
) -> None:
    engine = Engine(demo_path(), dtype=dtype, **settings)
    found = divergence(engine)
    asked = ", ".join([dtype, *settings.values()])
    report(f"int4 demo, chosen for {asked}: {kernels(engine)}, KL {found:.2e} nats per token, at most {bound:g}")
    assert found <= bound


@pytest.mark.parametrize("settings", [{}, {"cpu_weights": "int8"}], ids=["auto", "int8"])
def test_what_is_chosen_for_8_bit_layers(
    settings: dict[str, str], int8_folder: Path, divergence: Divergence, report: Callable[[str], None]
) -> None:
    engine = Engine(int8_folder, dtype="bfloat16", **settings)
    found = divergence(engine)
    report(f"{engine.model.quantization} demo: {kernels(engine)}, KL {found:.2e} nats per token, at most {KL_BOUND:g}")
    assert "int8" in engine.model.quantization
    assert found <= KL_BOUND


@pytest.mark.slow("The demo model chooses its kernels and reads 512 tokens, beside transformers")
@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        *thorough(({"numerics": "fast"}, "torch-int4"), ({"cpu_weights": "int8"}, "onednn-int8 and torch-dense")),
        ({"cpu_weights": "both", "numerics": "fast"}, "torch-int4+onednn-int8 and torch-int4"),
        ({}, "onednn-int8 and torch-dense"),
    ],
    ids=["fast", "int8", "both", "auto"],
)
@needs_onednn
def test_what_is_chosen_without_a_c_compiler(
    settings: dict[str, str],
    kernel: str,
    divergence: Divergence,
    report: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN's int8 is refused for the layers whose inputs are too many for one scale, by the bound of all."""
    monkeypatch.setattr(ops, "load_native_kernels", lambda: (None, "no C kernels: hidden by the test"))
    engine = Engine(demo_path(), dtype="bfloat16", **settings)
    found = divergence(engine)
    report(
        f"int4 demo without a compiler, {settings or 'auto'}: {kernels(engine)}, KL {found:.2e}, at most {KL_BOUND:g}"
    )
    assert set(kernels(engine).split(" and ")) == set(kernel.split(" and "))
    assert found <= KL_BOUND
    refused = "onednn-int8" in str(engine.choices) and "above its bound of 1.6%" in str(engine.choices)
    assert refused == ("onednn" in kernel)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, float]]:
    """An engine with these kernels whatever they cost, and the largest rounding error among its weights."""

    def build(layer: Any, head: Any, numerics: Any = "exact") -> tuple[Engine, float]:
        worst = [0.0]

        def choose(weight: Any, role: str, setting: Any) -> tuple[Any, str]:
            linear = (head if role == "head" else layer)(weight, setting)
            worst.append(rounding_error(linear, weight, setting.dtype))
            return linear, f"{linear.kernel}: forced"

        monkeypatch.setattr(cpu, "choose_linear", choose)
        return Engine(demo_path(), dtype="bfloat16", numerics=numerics), max(worst)

    return build


@pytest.mark.slow("The rounding of every weight is measured, and 512 tokens are read")
@pytest.mark.parametrize(
    ("layer", "head", "numerics"),
    [
        pytest.param(NativeDenseLinear, NativeDenseLinear, "exact", marks=needs_native, id="c-dense"),
        pytest.param(build_as_stored, NativeDenseLinear, "exact", marks=needs_native, id="c-int4"),
        pytest.param(build_int8, NativeDenseLinear, "exact", marks=needs_native, id="c-int8"),
        pytest.param(NativeDenseLinear, build_int8, "exact", marks=needs_native, id="c-int8-head"),
        pytest.param(TorchDenseLinear, TorchDenseLinear, "exact", id="torch-dense"),
        pytest.param(TorchInt4Linear, TorchDenseLinear, "fast", id="torch-int4"),
        pytest.param(TorchInt8Linear, TorchDenseLinear, "exact", marks=needs_onednn, id="onednn-int8"),
        pytest.param(TorchDenseLinear, TorchInt8Linear, "exact", marks=needs_onednn, id="onednn-int8-head"),
    ],
)
def test_the_rounding_that_is_measured_tells_the_divergence(
    layer: Any,
    head: Any,
    numerics: str,
    forced: Callable[..., tuple[Engine, float]],
    divergence: Divergence,
    report: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> None:
    """Every candidate alone, also where it would be refused: what the bound is reckoned from."""
    engine, worst = forced(layer, head, numerics)
    found = divergence(engine)
    name = request.node.callspec.id
    verdict = "within" if worst <= ROUNDING_BOUND else "above"
    report(f"{name} alone: KL {found:.2e}; rounds by at most {worst:.2%}, {verdict} the bound of {ROUNDING_BOUND:.1%}")
    assert found <= BF16_KL + KL_PER_SQUARE * worst**2
    assert (worst <= ROUNDING_BOUND) == (name != "onednn-int8")


def test_a_coarse_kernel_is_refused_by_the_engine(
    divergence: Divergence, monkeypatch: pytest.MonkeyPatch, forced: Callable[..., tuple[Engine, float]]
) -> None:
    class Coarse(TorchDenseLinear):
        """Activations of four bits."""

        kernel = "coarse"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            step = x.float().abs().amax(dim=1, keepdim=True) / 7
            return super().__call__(((x.float() / step).round() * step).to(x.dtype))

    monkeypatch.setattr(cpu_choice, "_INT4", [(Coarse, "very fast"), *cpu_choice._INT4])
    engine = Engine(demo_path(), dtype="bfloat16")
    assert "coarse" not in kernels(engine)
    assert "coarse rounds by" in str(engine.choices)
    assert divergence(engine) <= KL_BOUND
    careless, _ = forced(Coarse, TorchDenseLinear)
    assert divergence(careless) > KL_BOUND, "else refusing it shows nothing"
