"""A checkpoint that writes what it is told to: clients' whole tasks have results that can be asserted.

A real model of one layer whose next token depends on the last one alone. Each script is cut into tokens that occur once
in all scripts, so the first of them leads through it to its end. The chat template chooses: `script:NAME` in any
message is that script; as many answers as the conversation has, so far along in its turns it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from service_checkpoint import SPECIAL
from tiny_checkpoints import build_model, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 32_768
SURE = 40.0  # logits between the next token and all others
# Where a grammar forbids what comes next, the text closes what is open and ends.
CLOSING: Mapping[str, float] = {"}": 9.0, "]": 8.0, '"': 7.0, "0": 6.0}
LONGEST = 40
END = "<|im_end|>"

TEMPLATE = """
{%- set turn = namespace(answers=0, text='') %}
{%- if tools %}{{- '<|im_start|>system\\nA call is a <tool_call>: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- set turn.text = turn.text + (message.content or '') %}
    {%- if message.role == 'assistant' %}{%- set turn.answers = turn.answers + 1 %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- set chosen = namespace(mark='') %}
    {%- for name, turns in SCRIPTS %}
        {%- if not chosen.mark and (loop.last or ('script:' + name) in turn.text) %}
            {%- set now = turn.answers if turn.answers < turns else turns - 1 %}
            {%- set chosen.mark = '<|' + name + '-' + (now | string) + '|>' %}
        {%- endif %}
    {%- endfor %}
    {{- chosen.mark }}
{%- endif %}
"""


def build_scripts(folder: Path, scripts: Mapping[str, Sequence[str]]) -> Path:
    """Writes a checkpoint that knows the scripts, each a text for each turn of the model. Without a name: the last."""
    marks = {f"<|{name}-{turn}|>": text for name, turns in scripts.items() for turn, text in enumerate(turns)}
    chains = dict(zip(marks, unique_pieces(list(marks.values())), strict=True))
    pieces = [piece for chain in chains.values() for piece in chain]
    tokenizer = _tokenizer(pieces, [*SPECIAL, *marks])
    folder.mkdir(parents=True, exist_ok=True)
    ids = {text: tokenizer.token_to_id(text) for text in (*SPECIAL, *marks)}
    ids |= {piece: tokenizer.token_to_id(_bytes(piece)) for piece in (*pieces, *CLOSING)}
    follows = {
        ids[left]: ids[right]
        for mark, chain in chains.items()
        for left, right in zip((mark, *chain), (*chain, END), strict=True)
    }
    _write_model(
        folder, tokenizer.get_vocab_size(), follows, {ids[text]: logit for text, logit in CLOSING.items()}, ids[END]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    table = json.dumps([[name, len(turns)] for name, turns in scripts.items()])
    config = {"eos_token": END, "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    config["chat_template"] = TEMPLATE.replace("SCRIPTS", table)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def unique_pieces(texts: Sequence[str]) -> list[list[str]]:
    """Each text as pieces of two characters or more, none of which occurs twice in all of them."""
    used: set[str] = set()
    found = []
    for text in texts:
        pieces = next(_cuts(text, frozenset(used)), None)
        if pieces is None:
            raise ValueError(f"no pieces of {text!r} are its own")
        used.update(pieces)
        found.append(pieces)
    return found


def _cuts(text: str, used: frozenset[str]) -> Iterator[list[str]]:
    if not text:
        yield []
    for length in range(2, min(len(text), LONGEST) + 1):
        piece = text[:length]
        if piece not in used:
            for rest in _cuts(text[length:], used | {piece}):
                yield [piece, *rest]


def _bytes(text: str) -> str:
    """Return the text as a byte-level vocabulary writes it."""
    [(word, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return word


def _tokenizer(pieces: Sequence[str], special: Sequence[str]) -> Tokenizer:
    """Bytes, and the pieces, which no text is ever cut into: there are no merges."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_bytes, pieces)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _write_model(folder: Path, size: int, follows: Mapping[int, int], closing: Mapping[int, float], end: int) -> None:
    hidden = -(-size // 64) * 64
    model = build_model(
        "qwen2", vocab_size=size, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=hidden // 64, num_key_value_heads=1, max_position_embeddings=CONTEXT, eos_token_id=end,
    )  # fmt: skip
    scale = hidden**0.5  # what the norm makes of the one entry of a token's vector
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # layers add nothing
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.copy_(torch.eye(size, hidden))
        head.zero_()
        for token, logit in {**closing, end: 5.0}.items():
            head[token] = logit / scale
        for left, right in follows.items():
            head[right, left] = SURE / scale
    save_model(model, folder)
