"""In which order shapes are tuned: time may run out after any of them."""

from __future__ import annotations

import pytest

from motley.kernels.operation import Shape
from motley.kernels.precision import policy_of
from motley.kernels.registry import operation
from motley.kernels.tune import wanted


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_batches_and_contexts_vary_from_the_beginning(name: str) -> None:
    each, policy = operation(name), policy_of(9, 0)
    order = wanted(each, policy)
    assert sorted(map(str, order)) == sorted(map(str, each.shapes(policy)))
    first = order[:8]
    assert {shape["batch"] for shape in first} == {1, 8, 64}
    assert len({shape["context"] for shape in first}) >= 3
    assert len({(shape["heads"], shape["kv"]) for shape in first}) == 8, "heads and dtypes share no config: all of them"


def test_what_differs_most_in_free_sizes_is_farthest_apart() -> None:
    one, other = Shape.of(batch=1, dim=64, kv="bf16"), Shape.of(batch=8, dim=128, kv="int8")
    assert one.apart(other, frozenset({"dim"})) == 3
    assert one.apart(other) == 4
