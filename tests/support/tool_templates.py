"""Chat templates built like those of Qwen2.5, Qwen3 and Llama 3.1: the same constructs in words of our own."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "chat_templates"
QWEN3 = (FOLDER / "qwen3.jinja").read_text()
# As Qwen3's newer thinking models and DeepSeek-R1 do it: the prompt itself begins the reasoning.
OPENED = QWEN3.replace(
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}",
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- else %}\n        {{- '<think>\\n' }}\n    {%- endif %}",
)

TEMPLATES = {
    "qwen25": (FOLDER / "qwen25.jinja").read_text(),
    "qwen3": QWEN3,
    "opened": OPENED,
    "llama31": (FOLDER / "llama31.jinja").read_text(),
}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")


def write_tool_tokenizer(folder: Path, template: str, *, special_marks: bool = False) -> Path:
    """A tokenizer of bytes with one of TEMPLATES. `special_marks`: marks of calls and reasoning are special tokens."""
    from service_checkpoint import write_tokenizer

    write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    extra = (*HEADERS, *(MARKS if special_marks else ()))
    backend = json.loads((folder / "tokenizer.json").read_text())
    known = len(backend["model"]["vocab"]) + len(backend["added_tokens"])
    for i, text in enumerate((*extra, *(() if special_marks else MARKS))):
        backend["added_tokens"].append(_added(known + i, text, special=text in extra))
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    config |= {"chat_template": TEMPLATES[template], "bos_token": "<|begin_of_text|>"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config))
    return folder


def _added(token_id: int, text: str, *, special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special, **flags}
