"""From a name to a folder, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from motley.replicas.checkpoint.files.model_hub import DOWNLOADED_FILES, IGNORED_FILES
from motley.replicas.errors import CheckpointError
from motley.replicas.model.checkpoint_inspection import resolve_model


def test_a_folder_is_itself(tmp_path: Path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["nothing", "/no/such", "../up", "a/b/c", "org/", "org/na me", "", "x" * 5000], ids=len
)
def test_what_is_neither_folder_nor_id_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_model(name)


def test_an_id_is_downloaded_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}
    (tmp_path / "config.json").write_text("{}")

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name@v2") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/name", "v2")
    files = [
        *("model.safetensors", "config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"),
        *("pytorch_model.bin", "modeling.py", "original/model.safetensors", "consolidated.safetensors", "x.pth"),
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:5]
    assert (tuple(asked["allow_patterns"]), tuple(asked["ignore_patterns"])) == (DOWNLOADED_FILES, IGNORED_FILES)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("disk full"), ConnectionError("reset")])
def test_offline_is_one_line_with_a_remedy(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"org/name: cannot be downloaded.*local folder") as caught:
        resolve_model("org/name")
    assert "\n" not in caught.value.message
