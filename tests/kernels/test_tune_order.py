"""In which order shapes are tuned: time may run out after any of them."""

from __future__ import annotations

import pytest

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.registry import find_operation
from motley.kernels.tuning.table_writer import order_shapes


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_batches_and_contexts_vary_from_the_beginning(name: str) -> None:
    each, policy = find_operation(name), policy_of(9, 0)
    order = order_shapes(each, policy)
    assert sorted(map(str, order)) == sorted(map(str, each.shapes(policy)))
    first = order[:8]
    assert {shape["batch"] for shape in first} == {1, 8, 64}
    assert len({shape["context"] for shape in first}) >= 3
    assert len({(shape["heads"], shape["kv"]) for shape in first}) == 8, "heads and dtypes share no config: all of them"


def test_what_differs_most_in_free_sizes_is_farthest_apart() -> None:
    one, other = ProblemShape.of(batch=1, dim=64, kv="bf16"), ProblemShape.of(batch=8, dim=128, kv="int8")
    assert one.apart(other, frozenset({"dim"})) == 3
    assert one.apart(other) == 4
