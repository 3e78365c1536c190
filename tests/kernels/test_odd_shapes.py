"""Shapes that no table has, up to the oddest that the contracts admit: each finds a config that serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from motley.kernels.attention.attention_tile import HEAD_DIMS
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.config_tables import choose_config
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.pointwise.norm import MAX_COLUMNS, rms_norm
from motley.kernels.registry import find_operation

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "compile_odd.py"
HEADS = ((71, 1), (128, 1), (48, 1), (40, 8), (24, 4), (6, 1), (9, 3), (1, 1))


def attention(heads: int, kv_heads: int, dim: int, *, window: int = 0, kv: str, new: int = 0) -> ProblemShape:
    sizes = {"batch": 3, "context": 700, "heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window, "kv": kv}
    return ProblemShape.of(**sizes, new=new) if new else ProblemShape.of(**sizes)


@pytest.mark.parametrize("version", CAPABILITIES, ids=lambda version: "{}.{}".format(*version))
def test_any_heads_find_a_config_that_is_offered_for_them(version: tuple[int, int]) -> None:
    policy = policy_of(*version)
    for name, new in (("attention_decode", 0), ("attention_prefill", 90)):
        each = find_operation(name)
        for (heads, kv_heads), dim, window in product(HEADS, HEAD_DIMS, (0, 100)):
            for kv in (policy.storage, "int8"):
                shape = attention(heads, kv_heads, dim, window=window, kv=kv, new=new)
                config = choose_config(each, policy, shape).config
                assert config in each.configs(policy, shape)
                first, *_ = each.launches(policy, shape, config)
                rows = first.variant.all_constants["ROWS"]
                programs, constants = first.grid[0], first.variant.all_constants
                if name == "attention_decode" and "PARTS" in constants:
                    assert rows == 16, "more rows are more registers than there are"
                    assert programs * 16 >= heads, "every head has a row"


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_rows_of_any_length_stay_in_registers(name: str) -> None:
    each = find_operation(name)
    for version, columns in product(CAPABILITIES, (16, 1000, 6144, 8192, 12_288, 16_384, 18_432, 28_672, MAX_COLUMNS)):
        policy, shape = policy_of(*version), ProblemShape.of(n=columns, t=16)
        for config in (choose_config(each, policy, shape).config, *each.configs(policy, shape)):
            assert columns / (32 * config.num_warps) <= 80, (version, columns, config)
    with pytest.raises(ValueError, match="32784 columns are not accepted; expected 32768 at most"):
        rms_norm(torch.zeros(1, MAX_COLUMNS + 16), torch.ones(MAX_COLUMNS + 16), 1e-6, Config.of(16, BLOCK=4096))


# Of each kind what leaves a kernel the fewest registers, where it has been seen to spill or came near to it.
WORST = [
    (120, "attention_decode", attention(71, 1, 128, kv="bf16")),
    (120, "attention_decode", attention(48, 1, 64, window=100, kv="int8")),
    (86, "attention_decode", attention(128, 1, 256, kv="bf16")),
    (70, "attention_decode", attention(40, 8, 256, kv="fp16")),
    (61, "attention_decode", attention(6, 1, 96, window=100, kv="int8")),
    (86, "attention_prefill", attention(24, 4, 128, window=100, kv="bf16", new=90)),
    (61, "add_rms_norm", ProblemShape.of(n=16_384, t=16)),
    (75, "add_rms_norm", ProblemShape.of(n=MAX_COLUMNS, t=16)),
]


@pytest.mark.thorough
def test_the_worst_of_them_compile_without_a_fault() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = "\n".join(f"{cc} {op} {shape.key}" for cc, op, shape in WORST)
    said = subprocess.run(
        [sys.executable, str(SCRIPT)], input=lines, env=environment, capture_output=True, text=True, timeout=300
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == ""
