"""Check of whether the installed torch can use the GPUs that a fleet starts on, before Ray is started."""

from __future__ import annotations

from ....kernels.device.compute_capability import UnsupportedCapability
from ....kernels.device.torch_builds import is_cuda_build, list_cards, wheel_hint
from ...fleet.spec.fleet_file_loader import FleetFile
from ...fleet.spec.fleet_spec import FleetSpec
from ...service_errors import ConfigurationError


def check_torch(spec: FleetSpec, fleet: FleetFile | None) -> None:
    """Raise ConfigurationError with the remedy if GPUs are wanted on this machine and torch is a build for CPUs."""
    wanting = [
        number
        for number, pool in enumerate(spec.pools)
        if any(pool.gpus) and pool.simulate is None and pool.replicas.start
    ]
    if not wanting or is_cuda_build():
        return
    message = f"torch is a build for CPUs here, {_remedy()}"
    if fleet is not None:
        raise fleet.lines.error(("pools", wanting[0], "device"), message)
    raise ConfigurationError(f"--device: {message}", param="--device", code="no_place")


def _remedy() -> str:
    for name, capability in list_cards():
        try:
            return f"and the driver knows a GPU, {name}: {wheel_hint(capability)}"
        except UnsupportedCapability as error:
            return f"and of the GPU, {name}, {error}; serve on a CPU (device: cpu, --device cpu)"
    return (
        "and the driver knows no GPU (`motley doctor` tells what there is); serve on a CPU (device: cpu, "
        "--device cpu), or on a cluster that has one (--address)"
    )
