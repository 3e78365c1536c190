"""Writer of the tables in `tuned/`, from measurements on a GPU, or without one from compiled resources and the
roofline.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from ..compiler.aot import CompiledKernel
from ..compiler.compile_pool import CompileJob, compile_all
from ..device.device_context import DeviceContext
from ..device.precision import PrecisionPolicy, policy_of
from ..device.roofline import ElementwiseWork
from ..launch.config_tables import TUNED_FOLDER, ConfigEntry, ConfigTable, read_table_file, table_folder, write_table
from ..launch.kernel_operation import KernelOperation, ProblemShape, main_launch_index
from ..launch.known_spills import offered_configs
from ..launch.variant import Config
from .config_search import ConfigTrial, search_configs, search_memory_shortage
from .memory_bandwidth import MemoryBandwidth, measure_memory_bandwidth
from .static_prediction import ConfigCandidate, predict_seconds, reference_device, static_facts

# Most kernels to compile per shape, the first ones, since each is compiled for each capability. They are fewer for
# operators that only move bytes, for which a prediction can hardly distinguish configs. Configs that differ only in the
# grid, such as in parts of K, cost nothing, so all of them are taken.
STATIC_KERNELS, MOVING_KERNELS = 6, 3
NEAR = 1.25  # precision of predictions: within this factor of the best, the kernel that serves more shapes is taken


def write_static_tables(
    operations: Iterable[KernelOperation],
    capabilities: Iterable[tuple[int, int]],
    workers: int,
    out: Path = TUNED_FOLDER,
    done: Callable[[int, int], None] = lambda count, total: None,
    *,
    missing: bool = False,
) -> Iterator[Path]:
    """Write static tables, and yield each file once its operator is compiled.

    The first device of a capability in the table of devices provides the roofline.

    missing  only add entries for shapes that a table lacks, with kernels that it already has if any of them is offered
             for such a shape. Existing entries stay, unless they are of another version of Triton
    """
    import triton

    capabilities = tuple(capabilities)
    for operation in operations:
        written_entries: dict[tuple[int, int], Mapping[ProblemShape, ConfigEntry]] = {}
        for capability in capabilities if missing else ():
            table = read_table_file(out / table_folder(policy_of(*capability).capability) / f"{operation.name}.json")
            if table is not None and (table.source, table.about.get("triton")) == ("static", triton.__version__):
                written_entries[capability] = table.entries
        wanted = [
            job
            for capability in capabilities
            for job in _static_jobs(operation, capability, written_entries.get(capability, {}))
        ]
        candidates: dict[tuple[int, int], dict[ProblemShape, list[ConfigCandidate]]] = {}
        for job, results in compile_all(wanted, workers, done).items():
            if all(isinstance(result, CompiledKernel) for _, result in results):
                compiled = tuple((launch, result) for launch, result in results if isinstance(result, CompiledKernel))
                of_shape = candidates.setdefault(job.capability, {}).setdefault(job.shape, [])
                of_shape.append(ConfigCandidate(job.config, compiled))
        for capability in capabilities:
            policy = policy_of(*capability)
            device = reference_device(policy)
            entries = _fewest_kernels(
                {
                    shape: [
                        (predict_seconds(device, policy, operation, shape, candidate), candidate) for candidate in tried
                    ]
                    for shape, tried in candidates.get(capability, {}).items()
                }
            )
            if entries:
                about = {"device": device.name, "triton": triton.__version__}
                folder = out / table_folder(policy.capability)
                entries = {**written_entries.get(capability, {}), **entries}
                yield write_table(ConfigTable(operation.name, "static", about, entries), folder)


def write_measured_tables(
    operations: Iterable[KernelOperation],
    device_context: DeviceContext,
    out: Path = TUNED_FOLDER,
    report: Callable[[str], None] = lambda line: None,
    enough: Callable[[], bool] = lambda: False,
    ahead: Callable[[Sequence[CompileJob]], object] = lambda jobs: None,
) -> Iterator[Path]:
    """Write measured tables, and yield each file. `enough` is called before each shape; True ends the search.

    A shape that does not fit into memory, or that fails, is reported through `report` and skipped.

    ahead  called with the jobs that an operator's search will launch, so that they can be compiled on all cores before
    """
    memory = measure_memory_bandwidth(device_context.device)

    def failed(trial: ConfigTrial) -> None:
        if trial.why:
            report(f"  {trial.config.to_json()}: {trial.why}")

    for operation in operations:
        if not enough():
            ahead(search_jobs(operation, device_context.policy))
        entries = {}
        for shape in order_shapes(operation, device_context.policy):
            if enough():
                break
            if why := search_memory_shortage(operation, device_context, shape):
                report(f"{operation.name} {shape.key}: skipped: {why}")
                continue
            try:
                entry = search_configs(operation, device_context, shape, tried=failed)
            except Exception as error:  # noqa: BLE001  what CUDA raises has no common kind
                report(f"{operation.name} {shape.key}: {type(error).__name__}: {str(error)[:200]}")
                continue
            report(f"{operation.name} {shape.key}: {entry and (entry.config.to_json(), dict(entry.facts))}")
            if entry is not None:
                entries[shape] = entry
        if entries:
            yield merge_into_table(operation, device_context, entries, memory, out)


def order_shapes(operation: KernelOperation, policy: PrecisionPolicy) -> list[ProblemShape]:
    """Return the shapes to tune in an order where each is the farthest from those before it.

    So, whenever time runs out, every shape is near a tuned one. Among shapes that no earlier one serves, the one comes
    first that differs the most in sizes that need not be equal.
    """
    if operation.refusal(policy):
        return []
    left = dict.fromkeys(operation.shapes(policy), (math.inf, math.inf))
    order = []
    while left:
        order.append(farthest := max(left, key=lambda shape: left[shape]))
        del left[farthest]
        for shape, (served, apart) in left.items():
            exactly = shape.distance(farthest, operation.exact)
            left[shape] = min(served, exactly), min(apart, shape.apart(farthest, operation.exact))
    return order


def search_jobs(operation: KernelOperation, policy: PrecisionPolicy) -> list[CompileJob]:
    """Return the jobs that a search launches, in order, to be compiled ahead on all cores."""
    version = policy.capability.version
    return [
        CompileJob(operation.name, version, shape, config)
        for shape in order_shapes(operation, policy)
        for config in offered_configs(operation, policy, shape)
    ]


def merge_into_table(
    operation: KernelOperation,
    device_context: DeviceContext,
    entries: Mapping[ProblemShape, ConfigEntry],
    memory: MemoryBandwidth,
    out: Path = TUNED_FOLDER,
) -> Path:
    """Write measured entries into the device's table; its entries for other shapes stay.

    Entries that stay and were measured with another GPU or Triton get a fact "measured_by" that says so.
    """
    import triton

    about = {
        "gpu": device_context.about.name, "driver": _driver_version() if device_context.real else "",
        "torch": torch.__version__, "triton": triton.__version__, **memory.to_json(),
    }  # fmt: skip
    folder = out / table_folder(device_context.policy.capability, device_context.about)
    written = read_table_file(folder / f"{operation.name}.json")
    if written is not None:
        entries = {
            **{shape: _attribute_entry(entry, written.about, about) for shape, entry in written.entries.items()},
            **entries,
        }
    return write_table(ConfigTable(operation.name, "measured", about, entries), folder)


def _attribute_entry(entry: ConfigEntry, about_entry: Mapping[str, object], about: Mapping[str, object]) -> ConfigEntry:
    """Return an entry of a table about `about_entry` as it must appear in a table about `about`."""
    mine, theirs = ("{gpu}, Triton {triton}".format_map(defaultdict(str, each)) for each in (about, about_entry))
    facts = {"measured_by": theirs, **entry.facts}
    if facts["measured_by"] == mine:
        del facts["measured_by"]
    return ConfigEntry(entry.config, facts)


def _static_jobs(
    operation: KernelOperation, capability: tuple[int, int], present_entries: Mapping[ProblemShape, ConfigEntry]
) -> list[CompileJob]:
    """Return the jobs to compile for a static table, without the shapes of `written_entries`, whose entries stay."""
    policy = policy_of(*capability)
    if operation.refusal(policy):
        return []
    shapes = _tuned_shapes(operation, policy)
    used = {entry.config for entry in present_entries.values()}
    jobs = []
    for shape in shapes:
        if shape not in present_entries:
            configs = offered_configs(operation, policy, shape)
            configs = tuple(config for config in configs if config in used) or configs
            max_kernels = (
                MOVING_KERNELS if isinstance(operation.work(policy, shape), ElementwiseWork) else STATIC_KERNELS
            )
            each = [CompileJob(operation.name, capability, shape, config) for config in configs]
            launches = [job.launches() for job in each]
            kernels = [of_job[main_launch_index(of_job)].variant for of_job in launches]
            first = set(list(dict.fromkeys(kernels))[:max_kernels])
            jobs += [job for job, kernel in zip(each, kernels, strict=True) if kernel in first]
    return jobs


def _tuned_shapes(operation: KernelOperation, policy: PrecisionPolicy) -> list[ProblemShape]:
    """Return the operator's shapes and those samples that are tuned.

    Samples that exist only to be compiled, e.g. with a bias or with other scales, are left out. They use the config of
    other shapes or the default, which must be one of few, since they may be launched with any size.
    """
    samples = [shape for shape in operation.samples(policy) if shape == shape.plain]
    return list(dict.fromkeys(shape.rounded for shape in (*samples, *operation.shapes(policy))))


def _fewest_kernels(
    tried: Mapping[ProblemShape, Sequence[tuple[float, ConfigCandidate]]],
) -> dict[ProblemShape, ConfigEntry]:
    """Choose for each shape a config that is predicted to be near the best, using as few different kernels as
    possible.
    """
    near: dict[ProblemShape, dict[Config, tuple[float, ConfigCandidate]]] = {}
    for shape, predicted in tried.items():
        best = min(seconds for seconds, _ in predicted)
        for seconds, candidate in sorted(predicted, key=lambda each: each[0]):
            if seconds <= NEAR * best < math.inf:
                kernel = candidate.main[0].variant.config
                near.setdefault(shape, {}).setdefault(kernel, (seconds, candidate))
    entries: dict[ProblemShape, ConfigEntry] = {}
    while near:
        serves = Counter(kernel for options in near.values() for kernel in options)
        kernel = max(serves, key=lambda each: serves[each])
        for shape in [shape for shape, options in near.items() if kernel in options]:
            seconds, candidate = near.pop(shape)[kernel]
            entries[shape] = ConfigEntry(candidate.config, static_facts(candidate, seconds))
    return entries


@cache
def _driver_version() -> str:
    """Version of the driver that nvidia-smi reports; empty where it does not run."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.splitlines()[0].strip() if said.stdout else ""
