"""KServe's raw tensors: every value comes back, and no bytes do harm."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.api.kserve.kserve_tensors import Tensor, checked_tensor, from_raw, to_raw
from motley.replicas.errors import InvalidRequest

ELEMENTS = {
    "BYTES": st.binary(max_size=20),
    "BOOL": st.booleans(),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP32": st.floats(width=32, allow_nan=False),
}


@pytest.mark.parametrize("datatype", ELEMENTS)
@given(data=st.data())
def test_raw_there_and_back(datatype: str, data: Any) -> None:
    elements = tuple(data.draw(st.lists(ELEMENTS[datatype], max_size=20)))
    tensor = Tensor("x", datatype, (len(elements),), elements)
    assert from_raw("x", datatype, to_raw(tensor)) == elements


@pytest.mark.parametrize("datatype", [*ELEMENTS, "FP64", "", "bytes"])
@given(data=st.binary(max_size=64), shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))
def test_any_bytes_are_elements_or_refused_by_name(datatype: str, data: bytes, shape: list[int]) -> None:
    refused = None
    try:
        tensor = checked_tensor("x" * 200, datatype, shape, from_raw("x" * 200, datatype, data))
        lossy = datatype == "BOOL" or any(value != value for value in tensor.elements)  # any byte but 0; quiet NaN
        assert to_raw(tensor) == data or lossy
    except InvalidRequest as error:
        refused = error.message
    assert refused is None or (refused.startswith("x" * 80 + ": ") and len(refused) < 400)


def test_an_element_longer_than_the_rest() -> None:
    with pytest.raises(InvalidRequest, match="longer than what is left"):
        from_raw("x", "BYTES", struct.pack("<I", 2**32 - 1) + b"abc")


class Size(int):
    """Counts how often a product is made longer by one."""

    made = 0

    def __rmul__(self, other: int) -> int:
        Size.made += 1
        return int(other) * int(self)


def test_a_shape_of_many_large_sizes_is_not_multiplied_out() -> None:
    """A message of 8 MiB holds 900,000 of them: their product takes minutes, in which nobody is served."""
    with pytest.raises(InvalidRequest, match="does not fit its 1 elements"):
        checked_tensor("x", "INT64", [Size(2**63 - 1)] * 1000, [1])
    assert Size.made <= 2
    assert checked_tensor("x", "INT64", [2**62] * 9 + [0], []).elements == [], "none of anything is none"
    with pytest.raises(InvalidRequest, match="does not fit its 2 elements"):
        checked_tensor("x", "INT64", [1], [1, 2])
