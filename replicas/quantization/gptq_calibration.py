"""Layer-sequential calibration: each layer is quantized on what the already quantized ones before it produce.

That is how GPTQ (arXiv 2210.17323) keeps errors from piling up: a later layer learns to work with the inputs
it will really get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .gptq_writer import GptqCodes, GPTQSettings, Hessian, quantize_gptq

LayerInput = tuple[tuple[Any, ...], dict[str, Any]]


def layer_inputs(run: Callable[[Tensor], object], first: nn.Module, batches: Iterable[Tensor]) -> list[LayerInput]:
    """Return the arguments with which the first decoder layer is called when ``run`` takes each batch of ids int64 [B,
    T].
    """
    seen: list[LayerInput] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    handle = first.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for batch in batches:
            run(batch)
    finally:
        handle.remove()
    return seen


def find_linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return the named submodule; raises TypeError if it is not a linear layer."""
    module = layer.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{name} is a {type(module).__name__}; GPTQ quantizes nn.Linear")
    return module


def collect_hessians(layer: nn.Module, names: Sequence[str], inputs: Sequence[LayerInput]) -> dict[str, Hessian]:
    """Return the Hessians of the named linear layers, collected while ``layer`` runs over its inputs."""
    linears = {name: find_linear(layer, name) for name in names}
    hessians = {name: Hessian(linear.in_features) for name, linear in linears.items()}

    def recorder(hessian: Hessian) -> Callable[..., None]:
        return lambda _module, args, _output: hessian.add(args[0])

    handles = [linears[name].register_forward_hook(recorder(hessian)) for name, hessian in hessians.items()]
    try:
        for args, kwargs in inputs:
            layer(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return hessians


@torch.no_grad()
def quantize_layers(
    layers: Sequence[nn.Module],
    stages: Sequence[Sequence[str]],
    inputs: Sequence[LayerInput],
    settings: GPTQSettings,
    log: Callable[[str], None] = lambda line: None,
) -> list[dict[str, GptqCodes]]:
    """Quantize decoder layers in order, in place; returns per layer the codes of each linear by name.

    ``stages`` names the linears of a layer in running order, those with the same input together. Every stage
    is calibrated on what the already quantized stages and layers produce; afterwards each weight holds its
    dequantized values.
    """
    done: list[dict[str, GptqCodes]] = []
    for index, layer in enumerate(layers):
        made: dict[str, GptqCodes] = {}
        for names in stages:
            for name, hessian in collect_hessians(layer, names, inputs).items():
                linear = find_linear(layer, name)
                made[name] = quantize_gptq(linear.weight, hessian.mean(), settings)
                linear.weight.copy_(made[name].dequantize())
        outputs = [layer(*args, **kwargs) for args, kwargs in inputs]
        inputs = [
            ((out[0] if isinstance(out, tuple) else out, *args[1:]), kwargs)
            for out, (args, kwargs) in zip(outputs, inputs, strict=True)
        ]
        done.append(made)
        log(f"quantized layer {index + 1}/{len(layers)}")
    return done
