"""Choice of how many layers each pipeline stage gets, from what the processes of all stages report of their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...kv.blocks import blocks_for
from ...model.model_config import ModelConfig
from ...types import BLOCK_TOKENS
from .device_report import DeviceReport
from .partition import LayerCost, StageDevice, partition_layers, stage_seconds

__all__ = ["best_layers", "check_ranks_alike", "choose_layers", "layers_are_automatic"]

_CONTEXT = 1024  # tokens of KV that a step is assumed to read


def layers_are_automatic(config: EngineConfig) -> bool:
    """Return whether the layers of the stages are chosen from the processes' reports, because there are several stages
    and the configuration does not say.
    """
    return config.pipeline_layers is None and config.pipeline_parallel > 1


def choose_layers(
    model: ModelConfig, config: EngineConfig, accounts: Callable[[], Sequence[DeviceReport]]
) -> tuple[tuple[int, ...], str]:
    """Return the number of layers of each stage, and the reason in words.

    accounts  waits for the reports of all processes and returns them; called only where the choice needs them

    Raises InvalidRequest where the layers do not fit.
    """
    if config.pipeline_layers is not None:
        return config.pipeline_layers, f"{_list(config.pipeline_layers)} layers: as configured"
    if config.pipeline_parallel == 1:
        return (model.num_layers,), "all layers: there is one stage"
    longest = config.max_model_len or BLOCK_TOKENS  # without max_model_len the length follows from the free memory
    return best_layers(model, accounts(), config.tensor_parallel, longest)


def best_layers(
    model: ModelConfig, accounts: Sequence[DeviceReport], ranks: int, tokens: int
) -> tuple[tuple[int, ...], str]:
    """Return the number of layers of each stage for which the slowest stage takes the least time, and the reason in
    words.

    accounts  reports of all processes, stage by stage, with `ranks` of each stage
    tokens    tokens of KV for which there must be memory

    Raises InvalidRequest where the layers do not fit.
    """
    accounts = _average_cpu_rates(accounts)
    owners, memory = _memory_draws(accounts)
    stage_devices = [
        _stage_device(model, accounts[first : first + ranks], owners[first : first + ranks], tokens)
        for first in range(0, len(accounts), ranks)
    ]
    found = partition_layers(stage_devices, memory)
    share = stage_seconds(stage_devices[-1], [stage_devices[-1].last]) / stage_seconds(
        stage_devices[-1], stage_devices[-1].layers[-1:]
    )
    return found, f"{_list(found)} layers: the slowest stage takes the least; the head is as much as {share:.2g} layers"


def check_ranks_alike(accounts: Sequence[DeviceReport], ranks: int) -> None:
    """Raise InvalidRequest where ranks of one stage differ in dtype or in kind of device: they could not add up their
    results.
    """
    for first in range(0, len(accounts), ranks):
        own = accounts[first : first + ranks]
        if len({(each.on_device, each.dtype) for each in own}) > 1:
            raise InvalidRequest(
                f"tensor_parallel: ranks of stage {first // ranks} are {'; and '.join(map(str, own))}: what they add "
                "up is of one dtype, on devices of one kind; expected such, or stages (pipeline_parallel)",
                param="tensor_parallel",
            )


def _average_cpu_rates(accounts: Sequence[DeviceReport]) -> list[DeviceReport]:
    """Replace the measured memory bandwidth of each CPU process by its host's average per thread, times its threads.

    The processes of one host measure at the same time and slow each other down. With the average, equal processes have
    equal figures, and the layers are divided in the same way at every start.
    """

    def of_thread(owner: str) -> float:
        own = [each for each in accounts if each.owner == owner and not each.on_device]
        return sum(each.bandwidth for each in own) / sum(each.threads for each in own)

    return [
        each if each.on_device else replace(each, bandwidth=each.threads * of_thread(each.owner)) for each in accounts
    ]


def _memory_draws(accounts: Sequence[DeviceReport]) -> tuple[list[str], dict[str, float]]:
    """Return for each process the name of the memory that it uses, and the usable bytes of each memory by name."""
    named: dict[str, str] = {}  # name of each memory by its owner
    owners: list[str] = []
    memory: dict[str, float] = {}
    for number, account in enumerate(accounts):
        own = account.name if account.name not in memory else f"{account.name} ({number})"
        name = own if account.on_device else named.setdefault(account.owner, own)
        owners.append(name)
        memory[name] = min(memory.get(name, account.usable), account.usable)
    return owners, memory


def _stage_device(
    model: ModelConfig, accounts: Sequence[DeviceReport], owners: Sequence[str], tokens: int
) -> StageDevice:
    """Return the costs of a model on the ranks of one stage; each rank is taken to be as slow as the slowest."""
    ranks, slowest = len(accounts), min(accounts, key=lambda each: each.bandwidth)
    kv_bytes = slowest.kv_block * blocks_for(tokens)
    read = slowest.kv_block * blocks_for(min(_CONTEXT, model.max_model_len))
    head = slowest.head
    return StageDevice(
        bandwidth=ranks * slowest.bandwidth,
        compute=ranks * min(each.compute for each in accounts),
        layers=[
            LayerCost(held + read, plan.operations, held + kv_bytes)
            for held, plan in zip(slowest.layers, model.layers, strict=True)
        ],
        first=LayerCost(0, 0, slowest.embedding),
        last=LayerCost(head, 2 * model.vocab_size * model.hidden_size, head),
        draws={name: owners.count(name) / ranks for name in owners},
    )


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
