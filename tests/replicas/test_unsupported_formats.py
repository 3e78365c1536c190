"""Models of other kinds: named for what they are, with a remedy, and by each command alike."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from thorough import thorough
from tiny_checkpoints import build_checkpoint, rewrite_config
from typer.testing import CliRunner

from motley.cli.app import app
from motley.replicas.checkpoint.files import unsupported_formats
from motley.replicas.checkpoint.files.unsupported_formats import (
    PACKINGS,
    UNSUPPORTED_METHODS,
    UNSUPPORTED_MODELS,
    explain_models,
)
from motley.replicas.demo import demo_path
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.servable_check import check_servable, check_servable_in_child
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint, resolve_model
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer_folders: dict[str, Path]) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("whole"), "qwen2")
    shutil.copytree(tokenizer_folders["qwen"], folder, dirs_exist_ok=True)
    return folder


def bare(*names: str, content: bytes = b"x") -> Change:
    """A folder with these files alone."""

    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(content)

    return make


def config(**changes: Any) -> Change:
    return lambda folder: rewrite_config(folder, lambda found: found | changes)


def beside(name: str, content: Any) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def pointer(name: str) -> Change:
    """Return the text that Git leaves in place of a large file where Git LFS is not set up."""

    def make(folder: Path) -> None:
        if name.endswith("index.json"):
            (folder / "model.safetensors").unlink()
        (folder / name).write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 11421896\n"
        )

    return make


def adapter(folder: Path) -> None:
    bare()(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "r": 8}))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def mlx(folder: Path) -> None:
    section = {"group_size": 64, "bits": 4}
    config(quantization=section, quantization_config=section)(folder)


def within(folder: Path) -> None:
    inner = folder / "base-w4g32"
    inner.mkdir()
    for path in [each for each in folder.iterdir() if each != inner]:
        path.rename(inner / path.name)


CASES: dict[str, tuple[Change, str, str, str]] = {  # how it is made -> file, tensor and what is said
    "gguf": (bare("model-Q4_K_M.gguf", "README.md", content=b"GGUF"), "model-Q4_K_M.gguf", "", "GGUF"),
    "gguf beside a config": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "a.gguf").write_bytes(b"GGUF")),
        "a.gguf", "", "GGUF"),
    "mlx": (mlx, "config.json", "quantization", "MLX"),
    "modelopt": (beside("hf_quant_config.json", {"producer": {"name": "modelopt"}}), "hf_quant_config.json", "",
                 "ModelOpt"),
    "quanto": (beside("quanto_qmap.json", {}), "quanto_qmap.json", "", "quanto"),
    "lora": (adapter, "adapter_config.json", "", "LoRA.*'org/base'.*merge_and_unload"),
    "lora beside a model": (beside("adapter_config.json", {"r": 8}), "adapter_config.json", "", "merge_and_unload"),
    "an adapter that is no lora": (beside("adapter_config.json", {"peft_type": "IA3"}), "adapter_config.json", "",
                                   r"an adapter \(IA3\), .*merge_and_unload"),
    "an adapter of a prompt": (beside("adapter_config.json", {"peft_type": "PREFIX_TUNING"}), "adapter_config.json", "",
                               r"an adapter \(PREFIX_TUNING\), .*cannot be merged"),
    "an adapter of no kind": (beside("adapter_config.json", {"peft_type": []}), "adapter_config.json", "", "adapter"),
    "ggml": (bare("ggml-model-q4_0.bin", content=b"lmgg"), "ggml-model-q4_0.bin", "", "before GGUF"),
    "mistral's own": (bare("consolidated.safetensors", "params.json", "tekken.json"), "consolidated.safetensors", "",
                      "Mistral"),
    "meta's own": (bare("consolidated.00.pth", "params.json", "tokenizer.model"), "consolidated.00.pth", "", "Meta"),
    "tensorrt": (config(builder_config={}, architectures=None), "config.json", "builder_config", "TensorRT"),
    "onnx": (bare("model.onnx"), "model.onnx", "", "ONNX"),
    "old bitsandbytes": (config(quantization_config={"load_in_4bit": True}), "config.json",
                         "quantization_config.quant_method", "bitsandbytes"),
    "modelopt's section": (config(quantization_config={"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}),
                           "config.json", "quantization_config.quant_method", "ModelOpt"),
    **{f"auto-round's {words}": (config(quantization_config={"quant_method": "auto-round", "bits": 4, **said}),
                                 "config.json", "quantization_config.packing_format", words)
       for words, said in {
           r"kind \(MXFP4, tensors": {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"},
           r"kind \(MXFP8, tensors": {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp_rceil",
                                         "bits": 8},
           r"kind \(NVFP4, tensors": {"packing_format": "auto_round:llm_compressor",
                                         "data_type": "nv_fp4_with_static_gs", "act_bits": 4},
           r"kind \(W8A8, whose": {"packing_format": "auto_round:llm_compressor", "data_type": "int", "bits": 8,
                                      "act_bits": 8},
           r"kind \(MXFP4\)": {"packing_format": "auto_round:mx_fp4", "data_type": "mx_fp4"},
           r"auto_round:new.* since others are not read": {"packing_format": "auto_round:new"},
       }.items()},
    **{f"auto-round's {packing}": (
        config(quantization_config={"quant_method": "auto-round", "bits": 4, "packing_format": packing}),
        "config.json", "quantization_config.packing_format", "not read here") for packing in PACKINGS},
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors", "", "Git LFS"),
    **{f"a pointer as {file}": (pointer(file), file, "", "Git LFS.*`git lfs pull`") for file in (
        "config.json", "model.safetensors.index.json", "tokenizer.json", "generation_config.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")},
    "a folder of folders": (within, "config.json", "", "base-w4g32"),
    **{method: (config(quantization_config={"quant_method": method, "bits": 4}), "config.json",
                "quantization_config.quant_method", "not read here") for method in UNSUPPORTED_METHODS},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_with_a_remedy(case: str, whole: Path, tmp_path: Path) -> None:
    make, file, tensor, words = CASES[case]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    make(folder)
    with pytest.raises(CheckpointError, match=rf"(?s){words}") as caught:
        check_servable(folder)
    assert (caught.value.file, caught.value.tensor) == (file, tensor)
    assert "; " in caught.value.message  # what one can do
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("pattern", UNSUPPORTED_MODELS)
def test_each_line_of_the_table_can_be_met(pattern: str) -> None:
    error = explain_models(["README.md", pattern.replace("*", "x")])
    assert error is not None
    assert error.message == f"{error.file}: is {UNSUPPORTED_MODELS[pattern]}"


def test_files_of_other_kinds_beside_a_whole_model_do_no_harm(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    for name in ("model.gguf", "params.json", "consolidated.safetensors", "model.onnx", "tekken.json", "x.tiktoken"):
        (folder / name).write_bytes(b"x")
    check_servable(folder)


# --- a file in a folder's place, and a repository -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("m.gguf", b"GGUF\3", "GGUF"), ("model.bin", b"tjgg\3", "before GGUF"), ("g.litertlm", b"", "LiteRT-LM"),
        ("sha256-0a1b", b"GGUF\3", "GGUF"), ("model.safetensors", b"", "the folder"),
        ("config.json", b"{}", "the folder"), ("model.nemo", b"", "NeMo"), ("notes", b"hello", "give a folder"),
        ("empty", b"", "give a folder"),
    ],
)  # fmt: skip
def test_a_file_in_the_place_of_a_folder(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_model(tmp_path / name)
    assert caught.value.file == name
    assert "; give" in caught.value.message


def test_a_repository_of_gguf_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of it is downloaded, and its list of files says what it is."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    names = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]
    api = SimpleNamespace(list_repo_files=lambda name, revision: names)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    with pytest.raises(CheckpointError, match=r"org/m-GGUF: holds m-Q4_K_M\.gguf, which is a GGUF file") as caught:
        resolve_model("org/m-GGUF")
    assert caught.value.file == "org/m-GGUF"
    names.clear()
    assert resolve_model("org/m-GGUF") == tmp_path  # for others to say that it has no config.json


def test_a_cached_repository_without_a_config_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(name: str, revision: str | None) -> list[str]:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(list_repo_files=offline))
    assert resolve_model("org/m") == tmp_path


# --- tokenizers ---------------------------------------------------------------------------------------------

RANKS = b"\n".join(base64.b64encode(bytes([i])) + b" %d" % i for i in range(256))
VOCABULARIES = [
    ("tekken.json", b"{}", "Mistral's own vocabulary"),
    ("qwen.tiktoken", RANKS, "tiktoken"),
    ("tokenizer.model", RANKS, "tiktoken"),
    ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "install the package sentencepiece"),
    ("spiece.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "install the package sentencepiece"),
    ("sentencepiece.bpe.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "install the package sentencepiece"),
]


@pytest.mark.parametrize(("name", "content", "words"), VOCABULARIES)
def test_a_vocabulary_alone_is_named(
    name: str, content: bytes, words: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_formats.importlib.util, "find_spec", lambda _: None)
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    for found in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / found).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    assert Tokenizer.is_in(folder)
    for look in (check_servable, Tokenizer.load):
        with pytest.raises(CheckpointError, match=words) as caught:
            look(folder)
        assert caught.value.file == name
        assert "tokenizer.json is missing" in caught.value.message


def test_with_sentencepiece_its_vocabulary_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert unsupported_formats.explain_tokenizer(tmp_path) is None


# --- each command says the same -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gguf", "lora", *thorough("mlx", "old bitsandbytes")])
def test_each_command_says_the_same(case: str, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    CASES[case][0](folder)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    said = caught.value.message
    with pytest.raises(CheckpointError) as served:  # serve, and a live roll
        check_servable_in_child(folder)
    assert served.value.message == said
    chat = ("generate", "--chat") if case in ("gguf", "lora") else ("generate",)  # others have a tokenizer to chat with
    for command in (["generate", "--prompt", "x"], [*chat, "--prompt", "x"], ["fit"]):
        result = CliRunner().invoke(app, [*command, str(folder)])
        assert said in str(result.exception) or said in result.output


def test_the_demo_is_none_of_these() -> None:
    unsupported_formats.refuse_unsupported_files(demo_path())
