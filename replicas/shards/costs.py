"""How many layers each stage gets, by what the processes of all stages have said of their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..blocks import blocks_for
from ..config import ModelConfig
from ..engine_config import EngineConfig
from ..errors import InvalidRequest
from ..predict import linear_shapes
from ..protocol import BLOCK_TOKENS
from .partition import Cost, Seat, partition, stage_seconds
from .places import Account

__all__ = ["best_layers", "check_alike", "chooses_layers", "chosen_layers"]

_CONTEXT = 1024  # tokens of KV that a step reads


def chooses_layers(config: EngineConfig) -> bool:
    """Whether layers go by what processes say of their devices."""
    return config.pipeline_layers is None and config.pipeline_parallel > 1


def chosen_layers(
    model: ModelConfig, config: EngineConfig, accounts: Callable[[], Sequence[Account]]
) -> tuple[tuple[int, ...], str]:
    """Layers of each stage, and why so many. accounts: waits for those of all processes. Raises InvalidRequest."""
    if config.pipeline_layers is not None:
        return config.pipeline_layers, f"{_list(config.pipeline_layers)} layers: as configured"
    if config.pipeline_parallel == 1:
        return (model.num_layers,), "all layers: there is one stage"
    longest = config.max_model_len or BLOCK_TOKENS  # where it is not said, it is what there is room for
    return best_layers(model, accounts(), config.tensor_parallel, longest)


def best_layers(
    model: ModelConfig, accounts: Sequence[Account], ranks: int, tokens: int
) -> tuple[tuple[int, ...], str]:
    """Layers of each stage, and why so many. tokens: of KV that there is to be room for.

    accounts  stage by stage, of each so many ranks

    Raises InvalidRequest.
    """
    accounts = _evened(accounts)
    owners, memory = _memories(accounts)
    seats = [
        _seat(model, accounts[first : first + ranks], owners[first : first + ranks], tokens)
        for first in range(0, len(accounts), ranks)
    ]
    found = partition(seats, memory)
    share = stage_seconds(seats[-1], [seats[-1].last]) / stage_seconds(seats[-1], seats[-1].layers[-1:])
    return found, f"{_list(found)} layers: the slowest stage takes the least; the head is as much as {share:.2g} layers"


def check_alike(accounts: Sequence[Account], ranks: int) -> None:
    """Raises InvalidRequest for ranks of one stage that cannot add up what they have."""
    for first in range(0, len(accounts), ranks):
        own = accounts[first : first + ranks]
        if len({(each.on_device, each.dtype) for each in own}) > 1:
            raise InvalidRequest(
                f"tensor_parallel: ranks of stage {first // ranks} are {'; and '.join(map(str, own))}: what they add "
                "up is of one dtype, on devices of one kind; expected such, or stages (pipeline_parallel)",
                param="tensor_parallel",
            )


def _evened(accounts: Sequence[Account]) -> list[Account]:
    """CPUs of one host have what they measured together, by their threads: they did it at once, in each other's way.

    So those that are alike have the same figure, and their layers are the same at every start.
    """

    def of_thread(owner: str) -> float:
        own = [each for each in accounts if each.owner == owner and not each.on_device]
        return sum(each.bandwidth for each in own) / sum(each.threads for each in own)

    return [
        each if each.on_device else replace(each, bandwidth=each.threads * of_thread(each.owner)) for each in accounts
    ]


def _memories(accounts: Sequence[Account]) -> tuple[list[str], dict[str, float]]:
    """Of each process which memory it draws on, and how many bytes each of them has."""
    named: dict[str, str] = {}  # by owner
    owners: list[str] = []
    memory: dict[str, float] = {}
    for number, account in enumerate(accounts):
        own = account.name if account.name not in memory else f"{account.name} ({number})"
        name = own if account.on_device else named.setdefault(account.owner, own)
        owners.append(name)
        memory[name] = min(memory.get(name, account.usable), account.usable)
    return owners, memory


def _seat(model: ModelConfig, accounts: Sequence[Account], owners: Sequence[str], tokens: int) -> Seat:
    """Of a stage's ranks, each of which does as much as the weakest."""
    ranks, slowest = len(accounts), min(accounts, key=lambda each: each.bandwidth)
    room = slowest.kv_block * blocks_for(tokens)
    read = slowest.kv_block * blocks_for(min(_CONTEXT, model.max_model_len))
    operations = 2 * sum(outputs * inputs for outputs, inputs in linear_shapes(model))
    head = slowest.head
    return Seat(
        bandwidth=ranks * slowest.bandwidth,
        compute=ranks * min(each.compute for each in accounts),
        layers=[Cost(held + read, operations, held + room) for held in slowest.layers],
        first=Cost(0, 0, slowest.embedding),
        last=Cost(head, 2 * model.vocab_size * model.hidden_size, head),
        draws={name: owners.count(name) / ranks for name in owners},
    )


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
