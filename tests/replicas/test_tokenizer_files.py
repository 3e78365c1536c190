"""A tokenizer folder means what transformers reads in it, whichever of its files says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from motley.replicas.errors import CheckpointError
from motley.replicas.text.tokenizer.tokenizer import Tokenizer

# What a template sees of each name, and a place for the conversation.
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token")
SEEN = "|".join(f"{{{{ {name} }}}}" for name in NAMES) + "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXTS = ["Hello <s>a</s><|x|> b", "two  spaces", "<|x|><|x|>", "[INST]<|im_end|>"]
CHAT = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
UNK = {"content": "<unk>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
MARK = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": True, "single_word": False}
SOLE = {"__type": "AddedToken", "content": "<|x|>"}
PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
}  # fmt: skip


class Case(NamedTuple):
    """files: those beside tokenizer.json; `json`: what is changed in that."""

    name: str
    style: str
    files: Mapping[str, Any]
    json: Mapping[str, Any] = {}


def said(config: Mapping[str, Any], special: Any = None, added: Any = None, **more: Any) -> dict[str, Any]:
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special, "added_tokens.json": added, **more}
    return {name: content for name, content in files.items() if content is not None}


CASES = [
    Case("tokenizer.json-alone", "mistral", {}),
    Case("tokenizer.json-of-llama", "mistral", {"config.json": {"model_type": "llama"}}),
    Case("tokenizer.json-of-mistral", "mistral", {"config.json": {"model_type": "mistral"}}),
    Case("tokenizer.json-of-qwen2", "qwen", {"config.json": {"model_type": "qwen2"}}),
    Case("tokenizer.json-of-qwen3", "qwen", {"config.json": {"model_type": "qwen3"}}),
    Case("map-alone", "mistral", {"special_tokens_map.json": ENDS}),
    Case("map", "mistral", said(FAST, ENDS)),
    Case("map-wins", "mistral", said({**FAST, "bos_token": "<unk>", "eos_token": "<unk>"}, ENDS)),
    Case("map-is-unread", "mistral", said({**FAST, "bos_token": "<unk>", "added_tokens_decoder": {"0": UNK}}, ENDS)),
    Case("map-says-none", "mistral", said({**FAST, "bos_token": "<s>"}, {"bos_token": None})),
    Case("map-of-objects", "mistral", said(FAST, {"bos_token": MARK, "additional_special_tokens": ["<|x|>"]})),
    Case("map-of-a-bert", "mistral", said(FAST, {**ENDS, "sep_token": "</s>", "cls_token": "<s>"})),
    Case("added", "mistral", said(FAST, ENDS, {"<|x|>": 756})),
    Case("added-eos", "mistral", said(FAST, {**ENDS, "eos_token": "<|x|>"}, {"<|x|>": 756})),
    Case("added-is-unread", "mistral", said({**FAST, "added_tokens_decoder": {"0": UNK}}, None, {"<|x|>": 756})),
    Case("named-and-new", "mistral", said({**FAST, **ENDS, "pad_token": "<|x|>"})),
    Case("extra-list", "mistral", said({**FAST, **ENDS, "extra_special_tokens": ["<|x|>"]})),
    Case("extra-object", "mistral", said({**FAST, **ENDS, "extra_special_tokens": {"image_token": "<|x|>"}})),
    Case("additional", "mistral", said({**FAST, **ENDS, "additional_special_tokens": [SOLE]})),
    Case("own-name", "mistral", said({**FAST, **ENDS, "image_token": "<|x|>"})),
    Case("own-name-object", "mistral", said({**FAST, **ENDS, "image_token": SOLE})),
    Case("bos-asked-of-the-file", "mistral", said({**FAST, **ENDS, "add_bos_token": False, "add_eos_token": True})),
    Case("bos-asked-of-none", "mistral", said({**FAST, **ENDS, "add_bos_token": True}), {"post_processor": None}),
    Case("class-of-llama", "mistral", said(LLAMA)),
    Case("class-of-llama-fast", "mistral", said({"tokenizer_class": "LlamaTokenizerFast"})),
    Case("class-in-the-models-config", "mistral", {"config.json": {"model_type": "llama", **LLAMA}}),
    Case("class-says-none", "mistral", said({**LLAMA, "bos_token": None})),
    Case("class-of-legacy-llama", "llama2", said({**LLAMA, "legacy": True, "clean_up_tokenization_spaces": True})),
    Case("class-of-llama-3", "llama3", said(LLAMA)),
    Case("class-of-qwen", "qwen", said({"tokenizer_class": "Qwen2Tokenizer"})),
    Case("class-against-qwen2", "qwen", {"config.json": {"model_type": "qwen2"}, **said(FAST)}),
    Case("config-takes-special-back", "mistral",
         said({**FAST, **ENDS, "added_tokens_decoder": {"3": {"content": "[INST]", "special": False}}})),
    Case("padding-in-the-file", "mistral", said({**FAST, **ENDS}), {"padding": PADDING}),
]  # fmt: skip


def write(case: Case, tokenizer_folders: Mapping[str, Path], folder: Path) -> Path:
    shutil.copy(tokenizer_folders[case.style] / "tokenizer.json", folder)
    if case.json:
        state = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**state, **case.json}))
    for name, content in case.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_folder_says_what_transformers_reads(case: Case, tokenizer_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write(case, tokenizer_folders, tmp_path)
    (folder / "chat_template.jinja").write_text(SEEN)
    peer, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert tokenizer.named_tokens == peer.special_tokens_map
    assert tokenizer.eos_token_id == peer.eos_token_id
    assert tokenizer.vocab_size == len(peer)
    special_ids = {i for i, token in peer.added_tokens_decoder.items() if token.special}
    assert tokenizer.special_ids == special_ids | set(peer.all_special_ids)  # what decoding skips
    for text in TEXTS:
        for special in (True, False):
            assert tokenizer.encode(text, special) == peer.encode(text, add_special_tokens=special)
    assert tokenizer.chat_template is not None
    (rendered,) = tokenizer.chat_template.render(CHAT, add_generation_prompt=True)
    assert rendered == peer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


TEMPLATE_FILES = [
    ("config", {"tokenizer_config.json": {"chat_template": "C"}}, "C", "C"),
    ("config-names", {"tokenizer_config.json": {"chat_template": [
        {"name": "default", "template": "C"}, {"name": "tool_use", "template": "T{{ tools }}"}]}}, "C", "T"),
    ("file-wins", {"tokenizer_config.json": {"chat_template": "C"}, "chat_template.jinja": "F"}, "F", "F"),
    ("files-of-both", {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "T"}, "F", "T"),
    ("file-leaves-nothing-of-the-config", {"chat_template.jinja": "F", "tokenizer_config.json": {"chat_template": [
        {"name": "default", "template": "C"}, {"name": "tool_use", "template": "T"}]}}, "F", "F"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "plain", "tools"), [each[1:] for each in TEMPLATE_FILES],
                         ids=[each[0] for each in TEMPLATE_FILES])  # fmt: skip
def test_the_template_is_the_one_that_transformers_takes(
    files: dict[str, Any], plain: str, tools: str, tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(Case("", "mistral", files), tokenizer_folders, tmp_path)
    peer, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert tokenizer.chat_template is not None
    assert tokenizer.tool_template is not None
    assert tokenizer.chat_template.source == peer.get_chat_template() == plain
    assert tokenizer.tool_template.source == peer.get_chat_template(tools=TOOLS)
    assert tokenizer.tool_template.source[:1] == tools


def test_a_processors_template_counts_where_there_is_no_other(
    tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    """transformers reads it as a processor, not as a tokenizer."""
    folder = write(Case("", "mistral", {"chat_template.json": {"chat_template": "P"}}), tokenizer_folders, tmp_path)
    assert getattr(Tokenizer.load(folder).chat_template, "source", None) == "P"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "C"}')
    assert getattr(Tokenizer.load(folder).chat_template, "source", None) == "C"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("special_tokens_map.json", "[1]", "expected an object"),
        ("special_tokens_map.json", '{"eos_token": 3}', "eos_token: expected text"),
        ("special_tokens_map.json", r'{"eos_token": "\ud800"}', "surrogate"),
        ("special_tokens_map.json", '{"additional_special_tokens": "<x>"}', "expected a list"),
        ("added_tokens.json", '{"<|x|>": "y"}', "expected ids"),
        ("added_tokens.json", '{"<|x|>": -1}', "no content"),
        ("added_tokens.json", '{"<|x|>": 9000}', "cannot have id 9000"),  # transformers gives it another in silence
        ("chat_template.json", '{"chat_template": 3}', "expected text"),
        ("chat_template.json", '{"chat_template": "{% for"}', "not a valid chat template"),
        ("config.json", "{", "not valid JSON"),
    ],
)
def test_a_corrupt_file_is_named(
    file: str, content: str, says: str, tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(Case("", "mistral", {file: content}), tokenizer_folders, tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        Tokenizer.load(folder)
    assert caught.value.file == file
