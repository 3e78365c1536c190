"""Tokens that end an answer: whatever any of a checkpoint's files calls the end of a sequence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.null_engine import build_null_engine, null_device
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.model.generation_config import end_token_ids
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import FinishReason

END_OF_TEXT, TURN_END = 0, 2
CHAT = [{"role": "user", "content": "What does the with statement do?"}]


def rewrite(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, whose configurations name another end than its tokenizer: as fine-tunes for chats often do."""
    folder = Path(shutil.copytree(demo_path(), tmp_path_factory.mktemp("fine-tune") / "model"))
    rewrite(folder / "config.json", eos_token_id=END_OF_TEXT)
    rewrite(folder / "generation_config.json", eos_token_id=END_OF_TEXT)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, max_model_len=256)


def test_the_tokenizers_own_end_ends_an_answer(engine: Engine, folder: Path) -> None:
    prompt = Tokenizer.load(folder).chat(CHAT)
    assert engine.model.eos_token_ids == (END_OF_TEXT, TURN_END)
    (output,) = engine.generate([prompt], engine.sampling(max_tokens=200))
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids[-1] == TURN_END
    assert output.text
    assert "<|" not in output.text


def test_min_tokens_and_ignore_eos_know_of_it(engine: Engine, folder: Path) -> None:
    prompt = Tokenizer.load(folder).chat(CHAT)
    (ended,) = engine.generate([prompt], engine.sampling(max_tokens=200))
    (longer,) = engine.generate([prompt], engine.sampling(max_tokens=200, min_tokens=len(ended.token_ids) + 1))
    assert TURN_END not in longer.token_ids[: len(ended.token_ids)]
    (ignored,) = engine.generate([prompt], engine.sampling(max_tokens=len(ended.token_ids) + 4, ignore_eos=True))
    assert ignored.finish_reason is FinishReason.LENGTH


def test_a_grammar_may_end_with_it(engine: Engine) -> None:
    """Only an id that ends an answer may follow where a text is complete and could go on."""
    sampling = engine.sampling(max_tokens=20, grammar=GrammarSpec.regex("a{3,200}"), logit_bias={TURN_END: 100.0})
    (output,) = engine.generate([[5]], sampling)
    assert (output.text, output.finish_reason) == ("aaa", FinishReason.STOP)


def test_an_engine_that_computes_nothing_ends_likewise(folder: Path) -> None:
    built = build_null_engine(folder, EngineConfig(max_model_len=64), null_device(0.0))
    assert built.core.limits.eos_token_ids == (END_OF_TEXT, TURN_END)


@pytest.mark.parametrize(
    ("stated", "own", "ends"),
    [
        ((5,), 6, (5, 6)),
        ((5, 6), 6, (5, 6)),
        ((), 6, (6,)),
        ((5,), None, (5,)),
        ((5,), 100, (5,)),  # a token that the model cannot give
    ],
)
def test_every_file_that_names_an_end_counts(stated: tuple[int, ...], own: int | None, ends: tuple[int, ...]) -> None:
    assert end_token_ids(stated, own, 100) == ends


def test_a_turn_that_ends_with_another_token_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Not taken for an end of an answer: no file says so."""
    assert Tokenizer.load(folder).turn_end() == "<|im_end|>"
    other = Path(shutil.copytree(folder, tmp_path / "model"))
    rewrite(other / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert Engine(other, max_model_len=64).model.eos_token_ids == (END_OF_TEXT,)
    assert "chats end a turn with <|im_end|>" in caplog.text
