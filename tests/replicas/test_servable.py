"""Checks of a checkpoint before a service starts, and how far it is loaded afterwards."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from motley.replicas.checkpoint.reading.load_progress import LoadProgressFile, LoadProgressLog, read_load_progress
from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import CheckpointError
from motley.replicas.host.child_check import run_child_check
from motley.replicas.loading.servable_check import check_servable_in_child


def test_the_demo_is_and_a_folder_without_a_tokenizer_is_not(tmp_path: Path) -> None:
    check_servable_in_child(demo_path())
    folder = Path(shutil.copytree(demo_path(), tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is missing, .* put the tokenizer's files"):
        check_servable_in_child(folder)
    engine = Engine(folder, max_model_len=64)
    assert engine.choices["tokenizer"] == "none in the folder: token ids only, no text and no chat"
    assert "tokenizer" not in Engine(demo_path(), max_model_len=64).choices


def test_a_bad_checkpoint_comes_with_a_remedy(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_path(), tmp_path / "model"))
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"^config\.json: not valid JSON.*; download the checkpoint again"):
        check_servable_in_child(folder)


def test_progress_comes_through_a_file_for_each_process(tmp_path: Path) -> None:
    assert read_load_progress(tmp_path) == (0, 0)
    Engine(demo_path(), max_model_len=64, progress=LoadProgressFile(tmp_path))
    done, total = read_load_progress(tmp_path)
    assert done == total > 4_000_000
    (tmp_path / "1.loading").write_text("[5, 10]")
    assert read_load_progress(tmp_path) == (done + 5, total + 10)


def test_the_log_says_how_fast_it_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now, heard = [0.0], []
    said = LoadProgressLog(lambda *each: heard.append(each), lambda: now[0])
    for at, done in ((1.0, 1), (2.0, 4), (3.0, 5), (4.0, 5), (5.0, 1), (7.0, 2), (9.0, 8)):
        now[0] = at
        said(done * 10**9, 8 * 10**9)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 4.00 of 8.00 GB, at 2.00 GB/s",
        "weights: 5.00 of 8.00 GB, at 0.50 GB/s",
        "weights: 2.00 of 8.00 GB, at 0.50 GB/s",  # digested before, and read from the start again
    ]
    assert len(heard) == 7


def ends(*statements: str) -> list[str]:
    """Arguments of a check that prints, and ends as these statements do."""
    return ["-c", "; ".join(("import os, signal, sys", "print('said')", *statements))]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL, probably because memory was short"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "it was killed by SIGTERM"),
        ("sys.exit('no such module')", "it failed with status 1 (no such module)"),
    ],
)
def test_a_check_that_does_not_come_to_its_end_is_told(
    statement: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says nothing against the checkpoint, which is checked again where it is loaded: the start goes on."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: run([command[0], *ends(statement)], **more))
    check_servable_in_child("model")
    assert [record.getMessage() for record in caplog.records] == [
        f"the check whether model can be served did not come to its end: {said}; "
        "the start goes on without it, and says then what is wrong"
    ]


@pytest.mark.parametrize(("status", "found"), [(3, "said"), (0, None)])
def test_a_check_that_finds_a_fault_or_none_is_no_warning(
    status: int, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, ended = subprocess.run, ends(f"sys.exit({status})")
    monkeypatch.setattr(subprocess, "run", lambda command, **more: run([command[0], *ended], **more))
    assert run_child_check("module", [], refused=3, what="") == found
    assert not caplog.records
