"""`motley bench restart`: what is refused."""

from __future__ import annotations

import pytest

from motley.cluster.bench import restart


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen9"):
        restart.run(shape="qwen9")
    with pytest.raises(ValueError, match="awq"):
        restart.run(formats=["bf16", "awq"])
