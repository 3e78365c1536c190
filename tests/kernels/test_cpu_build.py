"""The C kernels' own compiler run, and their helper threads."""

import multiprocessing
import os
import stat
import threading

import pytest
import torch

from motley.kernels.canonical_weights import DenseWeight
from motley.kernels.cpu.c_kernels import native_build as cpu_build
from motley.kernels.cpu.c_kernels import native_kernels as cpu_native
from motley.kernels.cpu.layers.linear_settings import CpuLinearSettings
from motley.kernels.cpu.layers.native_linear import build_int8

NATIVE, REASON = cpu_native.load_native_kernels()
needs_native = pytest.mark.skipif(NATIVE is None, reason=REASON)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, as on a new machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_build.load_library.cache_clear()
    yield tmp_path
    cpu_build.load_library.cache_clear()


def test_no_compiler_is_a_reason_and_no_error(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    lib, reason = cpu_build.load_library()
    assert lib is None
    assert "no C compiler" in reason


def test_a_compiler_that_fails_is_a_reason(fresh, monkeypatch):
    for name in ("gcc", "cc"):
        program = fresh / name
        program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")
    lib, reason = cpu_build.load_library()
    assert lib is None
    assert "broken" in reason
    assert not list((fresh / "motley" / "native").iterdir()), "nothing is left behind"


@needs_native
def test_built_once_and_only_for_this_user(fresh):
    assert cpu_build.load_library("sha256")[0] is not None  # a small one
    (built,) = (fresh / "motley" / "native").iterdir()
    assert not stat.S_IMODE(built.parent.stat().st_mode) & 0o022
    before = built.stat().st_mtime_ns
    cpu_build.load_library.cache_clear()
    assert cpu_build.load_library("sha256")[0] is not None
    assert built.stat().st_mtime_ns == before


@needs_native
def test_a_folder_that_others_may_write_to_is_not_trusted(fresh):
    folder = fresh / "motley" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert cpu_build.load_library("sha256")[0] is not None
    assert not list(folder.iterdir())


def busy_linear():
    kernels, _ = cpu_native.load_native_kernels()
    kernels.threads = 3
    weight = DenseWeight(torch.randn(640, 256, generator=torch.Generator().manual_seed(0)))
    return build_int8(weight, CpuLinearSettings(torch.float32, torch.float32, "exact", None, kernels))


@needs_native
def test_many_callers_at_once():
    linear, x = busy_linear(), torch.randn(20, 256)
    want, wrong = linear(x), []

    def call():
        wrong.extend(i for i in range(200) if not torch.equal(linear(x), want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def in_child(linear, x, want, queue):
    queue.put(all(torch.equal(linear(x), want) for _ in range(20)))


@needs_native
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_helpers_are_started_anew_after_a_fork():
    linear, x = busy_linear(), torch.randn(20, 256)
    want = linear(x)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(linear, x, want, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get()
