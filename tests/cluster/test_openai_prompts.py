"""Completions that are about the prompt: echoed, with its log-probabilities, alone; and the best of several."""

from __future__ import annotations

import operator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import asgi
import pytest
import tokenizers
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.replicas.types import Delta, FinishReason, PromptLogprob, Request, StreamMessage, TokenLogprob

COMPLETIONS = "/v1/completions"
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class LikelyWorker(ScriptedWorker):
    """Gives every token of a prompt a log-probability by its id, and writes `written`, one choice each."""

    written = ("x",)

    async def generate(self, request: Request) -> Any:
        self.requests.append(request)
        entries: tuple[PromptLogprob, ...] | None = None
        if request.sampling.prompt_logprobs is not None:
            entries = (None, *(TokenLogprob(i, -i / 100, ((65, -0.01),)) for i in request.prompt_ids[1:]))
        deltas = [self._choice(i, text, request) for i, text in enumerate(self.written)]
        yield StreamMessage(tuple(deltas), cached_tokens=0, prompt_logprobs=entries)

    def _choice(self, index: int, text: str, request: Request) -> Delta:
        ids = tuple(self._tokenizer.encode(text))
        wanted = request.sampling.logprobs is not None
        logprobs = tuple(TokenLogprob(i, -float(index % 3) - 0.5) for i in ids) if wanted else None
        return Delta(index, ids, text, logprobs, STOP)


@pytest.fixture
async def likely(folder: Path) -> LikelyWorker:
    return LikelyWorker(str(folder), [])


@pytest.fixture
async def post(folder: Path, likely: LikelyWorker) -> Any:
    ingress = await make_ingress(folder, likely)
    return partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")


async def test_the_prompt_alone_with_its_log_probabilities(post: Any, likely: LikelyWorker) -> None:
    body = {"prompt": ["ab", "xyz"], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await post(COMPLETIONS, body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "xyz"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    for choice, text in zip(answer["choices"], ["ab", "xyz"], strict=True):
        first, *others = likely._tokenizer.encode(text)
        logprobs = choice["logprobs"]
        assert first is not None
        assert logprobs["tokens"] == list(text)
        assert logprobs["token_logprobs"] == [None, *(-i / 100 for i in others)]
        assert logprobs["top_logprobs"][0] is None
        assert all(letter in top for letter, top in zip(text[1:], logprobs["top_logprobs"][1:], strict=True))
        assert logprobs["text_offset"] == list(range(len(text)))
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 5
    assert {request.sampling.max_tokens for request in likely.requests} == {1}


async def test_the_prompt_alone_streamed_or_without_log_probabilities(post: Any) -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 0}
    choice = (await post(COMPLETIONS, body)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("ab", None)
    *chunks, done = (await post(COMPLETIONS, {**body, "logprobs": 0, "stream": True})).events()
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    tokens = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks]
    assert reduce(operator.iadd, tokens, []) == ["a", "b"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_nothing_to_write_is_refused_without_an_echo(post: Any) -> None:
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": False, "echo": True}):
        error = (await post(COMPLETIONS, {"prompt": "ab", **body})).json()["error"]
        assert error["param"] == "max_tokens"


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
async def test_offsets_count_characters_of_the_text(post: Any, likely: LikelyWorker, ids: bool) -> None:
    """A token here is a byte: those of one character begin where it does, and special ones are seen or not."""
    likely.written = ("é<|im_end|>",)
    text = "aé世b"
    prompt = likely._tokenizer.encode(text + "<|im_start|>")
    body = {"prompt": prompt if ids else text, "echo": True, "logprobs": 0, "max_tokens": 5}
    whole = (await post(COMPLETIONS, body)).json()["choices"][0]
    begins = [0, 1, 1, 2, 2, 2, 3]
    if ids:
        assert whole["text"].startswith(text + "<|im_start|>")
        begins.append(4)
    end = len(text + "<|im_start|>") if ids else 4
    assert whole["logprobs"]["text_offset"] == [*begins, end, end, end + 1]
    assert whole["logprobs"]["tokens"][1] == "bytes:\\xc3"
    events = (await post(COMPLETIONS, {**body, "stream": True})).events()[:-1]
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert reduce(operator.iadd, offsets, []) == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "b\u00e9"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "<|im_end|>ab"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, "<|im_end|>"),
        ({"truncate": 2}, "\u00e9"),
        ({"truncate_prompt_tokens": 5}, "<|im_end|>ab\u00e9"),
        ({"truncate_prompt_tokens": -1}, "<|im_end|>ab\u00e9"),
    ],
)
@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
async def test_an_echo_is_of_the_prompt_that_was_read(
    post: Any, likely: LikelyWorker, ids: bool, more: dict[str, Any], kept: str
) -> None:
    """Tokens here are bytes, and special ones."""
    text = "<|im_end|>ab\u00e9"
    likely.written = ("xy",)
    prompt = likely._tokenizer.encode(text) if ids else text
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, **more}
    choice = (await post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == f"{kept}xy"
    read = likely.requests[-1].prompt_ids
    assert likely._tokenizer.decode(read, skip_special_tokens=False) == kept
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == len(read) + 2
    assert logprobs["text_offset"][-2:] == [len(kept), len(kept) + 1]
    whole = [(offset, name) for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
             if not name.startswith("bytes:")]  # fmt: skip
    assert all(choice["text"].startswith(name, offset) for offset, name in whole)
    events = (await post(COMPLETIONS, {**body, "stream": True})).events()[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert reduce(operator.iadd, offsets, []) == logprobs["text_offset"]
    assert (await post(COMPLETIONS, {**body, "max_tokens": 0})).json()["choices"][0]["text"] == kept


async def test_offsets_where_the_tokenizer_adds_tokens_to_a_text(folder: Path, tmp_path: Path) -> None:
    """The text has special tokens of its own, which are seen; those that are added are not."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [(name, backend.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=ends
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    worker = LikelyWorker(str(tmp_path), [])
    post = partial(asgi.request, (await make_ingress(tmp_path, worker)).__serve_build_asgi_app__(), "POST")
    seen = len("a<|im_end|>")
    cases: list[tuple[dict[str, Any], str, list[int]]] = [
        ({"prompt": "a<|im_end|>b"}, "a<|im_end|>b", [0, 0, 1, seen, seen + 1]),
        ({"prompt": "ab"}, "ab", [0, 0, 1, 2]),
        ({"prompt": "a<|im_end|>b", "truncate": 2}, "b", [0, 1]),
        ({"prompt": "a<|im_end|>b", "truncate": 3, "truncation_side": "right"}, "a<|im_end|>", [0, 0, 1]),
        ({"prompt": "ab", "truncate": 1, "truncation_side": "right"}, "", [0]),
        ({"prompt": "a\u00e9", "truncate": 2}, "\ufffd<|im_end|>", [0, 1]),
    ]
    for more, text, offsets in cases:
        body = {"echo": True, "logprobs": 0, "max_tokens": 0, **more}
        choice = (await post(COMPLETIONS, body)).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets), more


async def test_the_likeliest_of_several(post: Any, likely: LikelyWorker) -> None:
    likely.written = ("a", "bbbb", "c", "dd", "e")  # their tokens: -0.5, -1.5, -2.5, -0.5, -1.5
    answer = (await post(COMPLETIONS, {"prompt": "x", "best_of": 5, "n": 3})).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "a", None), (1, "dd", None), (2, "bbbb", None)
    ]  # fmt: skip
    assert likely.requests[-1].sampling.n == 5
    assert answer["usage"]["completion_tokens"] == 9  # those of all that were written
    kept = (await post(COMPLETIONS, {"prompt": "x", "best_of": 5, "logprobs": 0})).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in kept] == [[-0.5]]
    same = (await post(COMPLETIONS, {"prompt": "x", "best_of": 5, "n": 5, "stream": True})).events()
    choices = [choice for event in same[:-1] for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == set(range(5))
    assert all(choice["logprobs"] is None for choice in choices), "nobody asked"
    assert likely.requests[-1].sampling.logprobs is None, "there is nothing to choose"
    refused = (await post(COMPLETIONS, {"prompt": ["a", "b"], "best_of": 100})).json()["error"]
    assert refused["param"] == "best_of"
    nothing = {"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 2}
    refused = (await post(COMPLETIONS, nothing)).json()["error"]
    assert (refused["param"], "max_tokens (0)" in refused["message"]) == ("min_tokens", True)


async def test_what_a_harness_asks_of_the_tokenizer(call: Any, post: Any) -> None:
    info = (await call("GET", "/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == (None, "<|im_end|>", 512)
    assert "im_start" in info["chat_template"]
    ids = (await post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})).json()["tokens"]
    assert ids == [258]


async def test_text_of_special_tokens_in_a_prompt(post: Any, likely: LikelyWorker) -> None:
    text = "a<|im_start|><|im_<|im_end|>end|>\x00b"
    for parse, special in ((None, 2), (True, 2), (False, 0)):
        reply = await post(COMPLETIONS, {"prompt": text, "parse_special": parse, "echo": True, "max_tokens": 0})
        assert reply.json()["choices"][0]["text"] == text
        ids = likely.requests[-1].prompt_ids
        assert sum(i in likely._tokenizer.special_ids for i in ids) == special
        assert likely._tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (await post(COMPLETIONS, {"prompt": text, "parse_special": 0})).json()["error"]["param"] == "parse_special"
