"""Every file of a checkpoint is opened in one way: links that leave the folder and pipes are refused, not followed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import CheckpointError
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

TEMPLATE = "additional_chat_templates/tools.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", TEMPLATE)
OTHER_FILES = ("config.json", "generation_config.json", "quantize_config.json", "model.safetensors")
OLDER_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "tokenizer.model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer_folders: dict[str, Path]) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("whole"), "qwen2")
    shutil.copytree(tokenizer_folders["qwen"], folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


def read(folder: Path) -> None:
    inspect_checkpoint(folder)
    Tokenizer.load(folder)


def link_out(path: Path) -> None:
    checkpoint = next(parent for parent in path.parents if parent.name == "checkpoint")
    outside = checkpoint.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("not-there")


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


BREAKS = [link_out, link_to_nothing, link_to_itself, pipe, folder_instead]


def test_the_whole_one_is_read(folder: Path) -> None:
    read(folder)


@pytest.mark.parametrize("spoil", BREAKS)
@pytest.mark.parametrize("name", [*TOKENIZER_FILES, *OTHER_FILES])
def test_each_file_is_opened_with_care(name: str, spoil: Callable[[Path], None], folder: Path) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_text("{}")
    spoil(path)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.file == name


@pytest.mark.parametrize("spoil", BREAKS)
@pytest.mark.parametrize("name", OLDER_FILES)
def test_files_for_transformers_too(name: str, spoil: Callable[[Path], None], folder: Path) -> None:
    """It converts an older tokenizer, and would open them itself."""
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / name).touch()
    spoil(folder / name)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.file == name


def test_a_folder_of_templates_that_leaves_the_checkpoint(folder: Path) -> None:
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    (outside / "tools.jinja").write_text("x")
    (folder / "additional_chat_templates").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leaves the checkpoint's folder"):
        read(folder)


def test_a_link_within_the_folder_is_fine(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    link = folder.parent / "link"
    link.symlink_to(folder)
    read(link)


def test_the_tokenizer_brings_no_code_either(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="runs no code of a checkpoint") as caught:
        read(folder)
    assert (caught.value.file, caught.value.tensor) == ("tokenizer_config.json", "auto_map")


def test_pickles_beside_safetensors_are_never_opened(folder: Path, tmp_path: Path) -> None:
    """Many repositories hold both. A pickle does harm only when opened, and no code here can: so it may lie there."""
    mark = tmp_path / "a pickle was opened"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(f"cos\nmkdir\n(S'{mark}'\ntR.".encode())
    engine = Engine(folder, max_model_len=64)
    assert engine.generate([[1, 2, 3]])[0].token_ids
    assert not mark.exists()
