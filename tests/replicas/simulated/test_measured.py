"""Rates that a real replica has measured are those that a simulated one takes, as far as a roofline can say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.replicas.demo import demo_path
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.simulated.device_measurements import read_attained_shares
from motley.replicas.simulated.roofline_rates import LONG_CONTEXT, roofline_rates
from motley.replicas.simulated.simulated_device import (
    ASSUMED_SHARES,
    RooflineShares,
    SimulatedDevice,
    find_model_shape,
    find_table_device,
)
from motley.replicas.simulated.simulated_worker import SimulatedWorker
from motley.replicas.types import PROFILED_BATCH_SIZES

SEVEN = find_model_shape("qwen2.5-7b")
MANY = len(PROFILED_BATCH_SIZES)
TRUE = (RooflineShares(0.8, 0.3, 2e-3), RooflineShares(0.4, 0.7, 1e-4), RooflineShares(0.95, 0.9, 5e-3))


def a_device(gpu: str, at: RooflineShares) -> SimulatedDevice:
    return SimulatedDevice(find_table_device(gpu), SEVEN, attained=at)


def profile_of(device: SimulatedDevice, chunk: int = 1024) -> dict[str, Any]:
    """Return the profile that a replica which takes just that time would measure of itself."""
    return {
        "prefill_tokens_per_s": chunk / device.step_s(0, 0, [(chunk, 0)]),
        "decode_s": [device.step_s(batch, batch) for batch in PROFILED_BATCH_SIZES],
        "context_s": (device.step_s(1, LONG_CONTEXT) - device.step_s(1, 1)) / (LONG_CONTEXT - 1),
        "max_batch_tokens": chunk,
        "device_name": device.device.names[0],
    }


def bench_of(device: SimulatedDevice, chunk: int = 512) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for batch, prompt, output in ((1, 128, 128), (8, 128, 128), (64, 128, 128), (256, 128, 128), (1, 2048, 128)):
        about = {"shape": SEVEN.name, "batch": batch, "prompt_tokens": prompt, "output_tokens": output}
        step_s = device.step_s(batch, batch * (prompt + output / 2))
        rows.append({"metric": "decode", "workload": about, "value": batch / step_s, "source": "measured"})
        ttft_s = sum(
            device.step_s(0, 0, [(min(chunk, prompt - at), at)]) for at in range(0, prompt, chunk)
        )  # fmt: skip
        rows.append({"metric": "time to first token", "workload": about, "value": ttft_s, "source": "measured"})
    rows.append({"metric": "decode", "workload": {"cut_off": True}, "value": 1e9, "source": "measured"})
    rows.append({"metric": "decode", "workload": rows[0]["workload"], "value": 1e9, "source": "rehearsal"})
    sides = {f"{SEVEN.name} motley": {"settings": {"max_batch_tokens": chunk}}}
    return {"bench": "engine", "machine": {"gpu": device.device.names[0]}, "sides": sides, "rows": rows}


def written(folder: Path, told: Any) -> Path:
    path = folder / "seen.json"
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return path


@pytest.mark.covering
@pytest.mark.parametrize("gpu", ["P40", "T4", "H100"])
@pytest.mark.parametrize("true", TRUE, ids=str)
@pytest.mark.parametrize("told", [profile_of, bench_of])
def test_what_was_measured_is_what_it_takes(
    tmp_path: Path, gpu: str, true: RooflineShares, told: Callable[[SimulatedDevice], dict[str, Any]]
) -> None:
    device = a_device(gpu, true)
    found = read_attained_shares(written(tmp_path, told(device)), gpu, SEVEN.name)
    assert found.measured == "seen.json"
    took, takes = (roofline_rates(replace(device, attained=each), 1024) for each in (true, found))
    assert takes.prefill_tokens_per_s == pytest.approx(took.prefill_tokens_per_s, rel=0.05)
    assert takes.decode_s == pytest.approx(took.decode_s, rel=0.05)
    assert takes.context_s == pytest.approx(took.context_s, rel=0.05)


def test_nothing_is_said_of_what_nothing_was_seen_of(tmp_path: Path) -> None:
    device = a_device("H100", RooflineShares(0.8, 0.3, 1e-3))
    bench = bench_of(device)
    bench["rows"] = [each for each in bench["rows"] if each["workload"].get("batch") == 1 and "step" not in each][:1]
    assert read_attained_shares(written(tmp_path, bench), "H100").arithmetic == ASSUMED_SHARES.arithmetic


def test_the_machine_may_be_told_in_a_file_beside(tmp_path: Path) -> None:
    bench = bench_of(a_device("T4", TRUE[0]))
    (tmp_path / "machine.json").write_text(json.dumps({"machine": bench.pop("machine")}))
    path = written(tmp_path, bench | {"rehearsal": False})
    assert read_attained_shares(path, "T4").bandwidth == pytest.approx(TRUE[0].bandwidth, rel=0.05)
    with pytest.raises(InvalidRequest, match="measured on Tesla T4"):
        read_attained_shares(path, "P40")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('{\n "decode_s": [1,\n 2,\n}', "seen.json:4: not valid JSON"),
        ("[]", "holds a list; expected an object"),
        ({"rows": 3}, "rows: expected a list"),
        ({"rows": [], "machine": {"cpu": "AMD"}}, "machine without a GPU"),
        ({"rows": []}, "no measured row of decode"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s: 0 is not accepted; expected a number"),
        ({"prefill_tokens_per_s": 1, "context_s": 0, "decode_s": [1.0]}, r"decode_s: \[1.0\].*expected .* numbers"),
        (
            {"prefill_tokens_per_s": 1, "context_s": 0, "decode_s": [None] * len(PROFILED_BATCH_SIZES)},
            "decode_s is missing|decode_s: is miss",
        ),
        (
            {"prefill_tokens_per_s": 1e-2, "context_s": 0, "decode_s": [1e-6] * len(PROFILED_BATCH_SIZES)},
            "times off what Tesla T4 could take",
        ),
        (profile_of(a_device("H100", ASSUMED_SHARES)), "it was measured on .*H100.*; expected Tesla T4"),
        ({"device_name": "Tesla T4, simulated with tiny in 4 bits"}, "nothing was measured"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, told: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_attained_shares(written(tmp_path, told), "T4", SEVEN.name)
    assert str(tmp_path / "seen.json") in caught.value.message


def test_whose_rates_they_are_is_asked_for_where_nobody_says(tmp_path: Path) -> None:
    path = written(tmp_path, profile_of(a_device("T4", ASSUMED_SHARES)))
    with pytest.raises(InvalidRequest, match="of which model"):
        read_attained_shares(path, "T4")
    with pytest.raises(InvalidRequest, match="No such file"):
        read_attained_shares(tmp_path / "none.json", "T4")


async def test_a_replica_says_that_it_is_simulated_as_measured(tmp_path: Path) -> None:
    true = TRUE[0]
    found = read_attained_shares(written(tmp_path, profile_of(a_device("T4", true))), "T4", SEVEN.name)
    worker = SimulatedWorker(demo_path(), EngineConfig(max_running=4), "T4", SEVEN.name, hidden=0.0, attained=found)
    await worker.start()
    try:
        profile = worker.profile()
    finally:
        await worker.close()
    assert profile.device == "simulated"
    assert "simulated with qwen2.5-7b in 4 bits, as measured (seen.json)" in profile.device_name
    assert "as measured (seen.json)" in profile.choices["engine"]
    assert profile.decode_s == pytest.approx(roofline_rates(a_device("T4", true), 512).decode_s, rel=0.05)
