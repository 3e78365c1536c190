"""Order in which `motley bench gpu` checks, tunes and measures kernels: goals and targets come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.launch.config_tables import choose_config
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape
from motley.kernels.launch.known_spills import offered_configs
from motley.kernels.launch.model_shapes import MODELS, REHEARSAL
from motley.kernels.launch.variant import Config
from motley.kernels.tuning.table_writer import order_shapes

from ..kernels.gpu_kernel_cases import gpu_cases
from . import gpu_kernel_targets

# Operators that a rehearsal tunes and measures; it checks all of them.
REHEARSED = ("w4a16_gemv", "attention_decode", "rms_norm")
FIRST_MODEL = "qwen2.5-7b"  # its layers are tuned and measured before those of other models

T = TypeVar("T")


class KernelOrder:
    """Order of the shapes of some operators, on one device.

    operations  operators that the device does not refuse
    """

    def __init__(self, device_context: DeviceContext, operations: Sequence[KernelOperation]) -> None:
        self._device_context = device_context
        self.operations = [each for each in operations if not each.refusal(device_context.policy)]

    def checks_of(self, operation: KernelOperation) -> Iterator[tuple[KernelOperation, ProblemShape, Config]]:
        """Yield an operator's checks: each shape with the config that a launch would have, and with the first one."""
        policy = self._device_context.policy
        more = operation.samples(policy) if self._device_context.real else ()
        for shape in (*operation.small(policy), *more):
            chosen = choose_config(
                operation, policy, shape, self._device_context.about if self._device_context.real else None
            ).config
            configs = dict.fromkeys((chosen, offered_configs(operation, policy, shape)[0]))
            for config in configs if self._device_context.real else [chosen]:
                yield operation, shape, config

    @cached_property
    def left_to_tune(self) -> dict[KernelOperation, list[ProblemShape]]:
        """Shapes left to tune of each operator, in order; who tunes one takes it out."""
        return {operation: self._tuned(operation) for operation in self._timed()}

    def _tuned(self, operation: KernelOperation) -> list[ProblemShape]:
        """Return an operator's shapes in the order in which they are tuned.

        Shapes that the targets are about come first, with a single token before more tokens; the others follow, those
        that differ most from one another first.
        """
        if not self._device_context.real:
            return list(operation.small(self._device_context.policy)[:1])
        return sorted(
            order_shapes(operation, self._device_context.policy),
            key=lambda shape: (rank := self.rank(operation, shape), shape.get("m", 0) if rank < 2 else 0),
        )

    def rank(self, operation: KernelOperation, shape: ProblemShape) -> int:
        """Return the priority of an operator's shape, as `gpu_kernel_targets.rank` has it; 0 comes first.

        In a rehearsal all have 0, since it goes through all of them.
        """
        if not self._device_context.real:
            return 0
        model = next(each for each in MODELS if each.name == FIRST_MODEL)
        workload = dict(shape.fields)
        return gpu_kernel_targets.rank(
            operation.name, workload, gpu_kernel_targets.is_judged(operation.name, workload) and model.has(shape)
        )

    def measured(self) -> list[tuple[str, KernelOperation, ProblemShape]]:
        """Return name, operator and shape of each measurement, in order."""
        models = (*MODELS[1:], MODELS[0]) if self._device_context.real else (REHEARSAL,)
        timed = self._timed()
        cases = [
            case
            for case in gpu_cases(self._device_context, models, None if self._device_context.real else (1,))
            if case[1] in timed
        ]
        ranks = [self.rank(*case[1:]) for case in cases]
        others = {
            operation: [case for case, rank in zip(cases, ranks, strict=True) if case[1] is operation and rank == 2]
            for operation in timed
        }
        judged = [
            [case for case, rank in zip(cases, ranks, strict=True) if case[1] is operation and rank < 2]
            for operation in timed
        ]
        first = sorted(in_turns(judged), key=lambda case: self.rank(*case[1:]))
        return [*first, *in_turns(others.values())]

    def _timed(self) -> list[KernelOperation]:
        return [each for each in self.operations if self._device_context.real or each.name in REHEARSED]


def in_turns(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first item of each group, then the second of each, and so on."""
    for round_ in itertools.zip_longest(*groups):
        yield from (each for each in round_ if each is not None)
