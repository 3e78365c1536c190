"""What can be told of a checkpoint before a service starts, and how far it is loaded afterwards."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from motley.replicas.checkpoint.reading.load_progress import LoadProgressFile, LoadProgressLog, read_load_progress
from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import CheckpointError
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
