import ctypes
import itertools
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.occupancy import occupancy

KIB = 1024


@pytest.mark.parametrize(
    ("version", "threads", "registers", "shared", "blocks", "warps", "limit"),
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers on 7.0 give 12 blocks of 128 threads
        # (75%) and 4 of 320 (63%). A warp takes 37 x 32 = 1184, rounded up to 1280; a scheduler's 16384 registers
        # hold 12 such warps, the SM 48: 48 // 4 = 12 blocks, 48 // 10 = 4 blocks of 10 warps.
        ((7, 0), 128, 37, 0, 12, 48, "registers"),
        ((7, 0), 320, 37, 0, 4, 40, "registers"),
        # 32 registers: 1024 a warp, 64 warps: all that 6.1 holds; 8 warps a block.
        ((6, 1), 256, 32, 0, 8, 64, "warps"),
        # 33 registers: 1056 rounded up to 1280, 12 warps a scheduler, 48 in all, 6 blocks of 8.
        ((6, 1), 256, 33, 0, 6, 48, "registers"),
        # 6.0 has two schedulers of 32768 registers, 6.1 four of 16384. 104 x 32 = 3328 a warp: 9 a scheduler and 18 in
        # all on 6.0, 3 blocks of 6 warps; 4 a scheduler and 16 in all on 6.1, 2 blocks.
        ((6, 0), 192, 104, 0, 3, 18, "registers"),
        ((6, 1), 192, 104, 0, 2, 12, "registers"),
        # 192 x 32 = 6144: 5 a scheduler on 6.0, 10 warps, room for a block of 10; on 6.1 it is 2 a scheduler, 8 warps.
        # What does not run on 6.1 does not run on 6.0.
        ((6, 1), 320, 192, 0, 0, 0, "registers"),
        ((6, 0), 320, 192, 0, 0, 0, "registers"),
        # 1 KiB is the driver's own from 8.0: 48 + 1 = 49 KiB a block, 100 // 49 = 2; before 8.0 96 // 48 = 2.
        ((8, 6), 128, 32, 48 * KIB, 2, 8, "shared memory"),
        ((6, 1), 128, 32, 48 * KIB, 2, 8, "shared memory"),
        # 8.0: 163 KiB with the driver's one is the whole SM; a byte more does not run.
        ((8, 0), 128, 32, 163 * KIB, 1, 4, "shared memory"),
        ((8, 0), 128, 32, 163 * KIB + 1, 0, 0, "shared memory"),
        # 6.1 has 96 KiB but gives a block no more than 48.
        ((6, 1), 128, 32, 48 * KIB + 1, 0, 0, "shared memory"),
        # one warp a block: 16 blocks on 7.5, 24 on 8.9, 32 on 9.0, whatever else there is room for.
        ((7, 5), 32, 16, 0, 16, 16, "blocks"),
        ((8, 9), 32, 16, 0, 24, 24, "blocks"),
        ((9, 0), 32, 16, 0, 32, 32, "blocks"),
        # 255 registers: 8160 rounded up to 8192 a warp, 2 a scheduler: one block of 8 warps fills the SM.
        ((9, 0), 256, 255, 0, 1, 8, "registers"),
        ((9, 0), 288, 255, 0, 0, 0, "registers"),
        ((9, 0), 1025, 16, 0, 0, 0, "warps"),
    ],
)
def test_by_hand(version, threads, registers, shared, blocks, warps, limit):
    chip = CAPABILITIES[version]
    found = occupancy(chip, threads, registers, shared)
    assert (found.blocks, found.warps) == (blocks, warps)
    assert limit in found.limits
    assert found.fraction == warps / (chip.threads_per_sm / 32)


@pytest.mark.parametrize("bad", [(0, 32, 0), (128, -1, 0), (128, 32, -1)])
def test_numbers_of_no_kernel(bad):
    with pytest.raises(ValueError, match="expected at least"):
        occupancy(CAPABILITIES[8, 0], *bad)


def test_more_of_anything_never_gives_more_blocks():
    for chip in CAPABILITIES.values():
        for registers, shared in itertools.product(range(16, 255, 13), range(0, 48 * KIB, 5000)):
            here = occupancy(chip, 128, registers, shared).blocks
            assert occupancy(chip, 128, registers + 1, shared).blocks <= here
            assert occupancy(chip, 128, registers, shared + 512).blocks <= here
            assert occupancy(chip, 160, registers, shared).blocks <= here


_C = """
#include <stddef.h>
#include <limits.h>
#include "cuda_occupancy.h"
int blocks(int major, int minor, int threads_sm, size_t shared_sm, size_t optin, size_t reserved,
           int threads, int registers, size_t shared) {
    struct cudaOccDeviceProp chip = {0};
    struct cudaOccFuncAttributes kernel = {0};
    struct cudaOccDeviceState state = {0};
    struct cudaOccResult result;
    chip.computeMajor = major; chip.computeMinor = minor; chip.maxThreadsPerBlock = 1024;
    chip.maxThreadsPerMultiprocessor = threads_sm; chip.regsPerBlock = 65536; chip.regsPerMultiprocessor = 65536;
    chip.warpSize = 32; chip.sharedMemPerBlock = 49152; chip.sharedMemPerMultiprocessor = shared_sm; chip.numSms = 1;
    chip.sharedMemPerBlockOptin = optin; chip.reservedSharedMemPerBlock = reserved;
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.maxDynamicSharedSizeBytes = shared;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &chip, &kernel, &state, threads, shared)) return -1;
    return result.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """NVIDIA's own calculator, from the header that Triton's wheel brings."""
    triton, compiler = find_spec("triton"), shutil.which("cc")
    header = Path(triton.origin).parent / "backends/nvidia/include/cuda_occupancy.h" if triton else Path("none")
    if not header.exists() or not compiler:
        pytest.skip("needs Triton's cuda_occupancy.h and a C compiler")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "blocks.c").write_text(_C)
    library = folder / "blocks.so"
    command = [compiler, "-O1", "-shared", "-fPIC", f"-I{header.parent}", str(folder / "blocks.c"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    blocks = ctypes.CDLL(str(library)).blocks
    blocks.argtypes = [*[ctypes.c_int] * 3, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
    return blocks


@pytest.mark.parametrize("chip", CAPABILITIES.values(), ids=str)
def test_as_nvidia_calculates(nvidia, chip):
    if chip.major >= 10 and nvidia(*_limits(chip), 128, 32, 0) < 0:
        pytest.skip(f"the header of this Triton does not know {chip}")
    threads = (1, 32, 96, 128, 160, 192, 256, 320, 512, 768, 1024, 1025)
    registers = (0, 1, 16, 24, 32, 33, 40, 56, 64, 72, 80, 96, 104, 128, 168, 192, 255)
    shared = (0, 1, 100, 1024, 8191, 16384, 33000, 49152, 49153, 65536, 98304, 101376, 166912, 232448, 232449)
    compared = 0
    for resources in itertools.product(threads, registers, shared):
        assert occupancy(chip, *resources).blocks == nvidia(*_limits(chip), *resources), resources
        compared += 1
    assert compared > 3000


def _limits(chip):
    return *chip.version, chip.threads_per_sm, chip.shared_per_sm, chip.shared_optin, chip.shared_reserved
