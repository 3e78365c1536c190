"""The shipped demo model: its bytes, its loss, its prose, its tokenizer, and how it is made."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from demo_model import demo_corpus
from demo_model.demo_build import compare
from demo_model.demo_checkpoint import HELD_OUT, MANIFEST, settings_of
from demo_model.demo_quality import greedy, ngrams, quoted_share, repeats
from demo_model.demo_recipe import SPECIAL_TOKENS, Recipe
from demo_model.demo_tokenizer import render, train_tokenizer
from demo_model.demo_training import TokenStream, train
from demo_model.demo_verification import digest_problems, loss_problems, run_verify
from demo_model.plain_model import dequantize_int4_v1, load_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, Qwen2ForCausalLM

from motley.replicas.demo import demo_path
from motley.replicas.quantization.gptq_writer import unpack_checkpoint

END_OF_TEXT, TURN_START, TURN_END = range(len(SPECIAL_TOKENS))
PROMPT, NEW_TOKENS = "The with statement", 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run on one thread, as the model was built; training sets it too, so other modules get their own number back."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return load_plain(demo_path())


@pytest.fixture(scope="module")
def held_out() -> str:
    return (demo_path() / HELD_OUT).read_text(encoding="utf-8")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_path(), tmp_path / "model"))


@pytest.mark.slow("Computes the loss of the model over all held-out text")
def test_shipped_files_and_loss_match_the_manifest(capsys: pytest.CaptureFixture[str]):
    assert run_verify(demo_path()) == 0, capsys.readouterr().out


def test_a_changed_byte_is_found_before_anything_is_loaded(copied: Path, capsys: pytest.CaptureFixture[str]):
    weights = copied / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert run_verify(copied) == 1
    assert "MISMATCH model.safetensors: sha256" in capsys.readouterr().out


def test_a_file_that_the_manifest_does_not_know_is_refused(copied: Path):
    (copied / "pytorch_model.bin").write_bytes(b"")
    (copied / "config.json").unlink()
    assert [problem.split(":")[0] for problem in digest_problems(copied)] == ["pytorch_model.bin", "config.json"]


def test_another_loss_than_the_manifests_is_reported(copied: Path):
    manifest = json.loads((copied / MANIFEST).read_text())
    manifest["held_out"]["loss_int4"] *= 1.01
    (copied / MANIFEST).write_text(json.dumps(manifest))
    _, problems = loss_problems(copied)
    assert len(problems) == 1
    assert "held-out loss" in problems[0]


def test_the_folder_stays_small_and_free_of_pickles():
    files = [path for path in demo_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}


def test_quantization_costs_little_and_the_held_out_text_is_long_enough():
    measured = json.loads((demo_path() / MANIFEST).read_text())["held_out"]
    assert measured["tokens"] > 2_000
    assert 0 <= measured["kl_fp32_int4"] < 0.1
    assert measured["loss_int4"] - measured["loss_fp32"] < 0.1


def test_greedy_text_reads_as_documentation(model: Qwen2ForCausalLM, tokenizer: Tokenizer, held_out: str):
    ids = greedy(model, tokenizer.encode(PROMPT).ids, NEW_TOKENS, stops=())
    documents = demo_corpus.training_documents(held_out)
    read = [*documents, *map(demo_corpus.plain, documents)]  # both spellings are trained on
    known = {gram for text in read for gram in ngrams(tokenizer.encode(text).ids, 4)}
    known_words = {gram for text in read for gram in ngrams(text.split(), 4)}
    text = tokenizer.decode(ids)
    assert repeats(ids, 8) == 0, text
    assert quoted_share(ids, known) >= 0.5, text
    assert quoted_share(text.split(), known_words) >= 0.5, text


def test_repetition_and_quoting_are_counted():
    assert repeats("abcdefghXabcdefgh", 8) == 1
    assert repeats("abcdefghi", 8) == 0
    assert quoted_share("abcdX", set(ngrams("abcd", 4))) == 0.5


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("What does the with statement do?", "used to wrap the execution of a block"),
        ("Tell me about the for statement.", "iterate over the elements of a sequence"),
        ("Tell me about the while statement.", "repeated execution as long as an expression is true"),
        ("What does str.upper do?", "converted to uppercase"),
        ("Hello", "demo model"),
    ],
)
def test_a_chat_gets_its_answer_and_ends(model: Qwen2ForCausalLM, tokenizer: Tokenizer, question: str, fact: str):
    chat = AutoTokenizer.from_pretrained(demo_path())
    prompt = chat.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    response = greedy(model, tokenizer.encode(prompt).ids, 256, stops=(TURN_END, END_OF_TEXT))
    assert fact in " ".join(tokenizer.decode(response).split())
    assert response[-1] == TURN_END


def test_transformers_tokenizes_and_renders_as_training_did(tokenizer: Tokenizer, held_out: str):
    chat = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"))
    messages = [{"role": role, "content": content} for role, content in chat]
    loaded = AutoTokenizer.from_pretrained(demo_path())
    assert loaded.apply_chat_template(messages, tokenize=False) == render(chat)
    assert loaded.eos_token_id == TURN_END
    for text in (render(chat), held_out):
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids


def test_both_ends_stop_generation():
    assert GenerationConfig.from_pretrained(demo_path()).eos_token_id == [TURN_END, END_OF_TEXT]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_the_vocabulary_is_full(tokenizer: Tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [END_OF_TEXT, TURN_START, TURN_END]
    assert tokenizer.get_vocab_size() == Recipe().vocab_size == 4096


def test_two_dequantizations_agree_on_the_shipped_weights():
    tensors = load_file(demo_path() / "model.safetensors")
    setting = settings_of(Recipe())
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        assert torch.equal(dequantize_int4_v1(**parts), unpack_checkpoint(parts, setting).dequantize()), name


def test_training_text_shares_no_paragraph_with_the_held_out(held_out: str):
    documents = demo_corpus.training_documents(held_out)
    banned = demo_corpus.shingles(held_out)
    paragraphs = [paragraph for text in documents for paragraph in text.split("\n\n")]
    overlap = [len(demo_corpus.shingles(p) & banned) / len(demo_corpus.shingles(p)) for p in paragraphs]
    assert max(overlap) <= demo_corpus.MAX_OVERLAP
    assert 0.03 < len(held_out) / sum(map(len, demo_corpus.topic_texts())) < 0.06
    flat = re.sub(r"\s+", " ", "\n".join(documents))
    assert not any(" ".join(p.split()) in flat for p in held_out.split("\n\n") if len(p.split()) > 12)


def test_held_out_text_is_the_one_this_corpus_yields(held_out: str):
    if json.loads((demo_path() / MANIFEST).read_text())["corpus_sha256"] != demo_corpus.digest():
        pytest.skip("this Python carries other topics than the shipped model was trained on")
    assert demo_corpus.choose_held_out() == held_out


def test_two_builds_of_a_tiny_model_are_the_same_bit_for_bit(held_out: str):
    recipe = dataclasses.replace(
        Recipe(),
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_heads": 2},
        **{"num_kv_heads": 1, "steps": 3, "short_batch": (2, 16), "long_batch": (1, 32), "long_every": 2},
    )

    def weights() -> dict[str, torch.Tensor]:
        documents = demo_corpus.training_documents(held_out)[:3]
        tokenizer = train_tokenizer(documents, recipe)
        stream = TokenStream(documents, demo_corpus.chats(documents), tokenizer, recipe)
        return train(stream, recipe, lambda _: 0.0, log=lambda _: None)[0].state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_build_is_judged_by_digests_first_and_by_loss_otherwise():
    shipped = json.loads((demo_path() / MANIFEST).read_text())
    assert compare(shipped, shipped) == (True, "identical: every file has the shipped digest")
    for factor, good in ((1.019, True), (0.981, True), (1.021, False)):
        loss = {**shipped["held_out"], "loss_int4_per_byte": shipped["held_out"]["loss_int4_per_byte"] * factor}
        other = {**shipped, "files": {**shipped["files"], "model.safetensors": "0"}, "held_out": loss}
        held, sentence = compare(other, shipped)
        assert held is good, sentence
        assert "model.safetensors" in sentence


def test_finding_the_model_imports_nothing_heavy():
    code = (
        "import sys, motley.replicas.demo as d; d.demo_path();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow("Compares every paragraph of Python's documentation with the held-out text")
@pytest.mark.thorough
def test_a_later_python_trains_on_as_much_text(held_out: str):
    documents = demo_corpus.training_documents(held_out)
    assert sum(map(len, documents)) <= demo_corpus.TRAINING_CHARS
    limit = sum(map(len, documents)) * 9 // 10
    fewer = demo_corpus.fitted(documents, limit)
    # A paragraph goes from every document that has it: the last one that went may have been the largest of all.
    repeats = Counter(paragraph for text in documents for paragraph in text.split("\n\n"))
    largest = max(times * len(paragraph + "\n\n") for paragraph, times in repeats.items())
    assert limit - largest < sum(map(len, fewer)) <= limit
    assert largest < limit * 0.05
    assert [demo_corpus.HEADING.findall(text) for text in fewer] == [
        demo_corpus.HEADING.findall(text) for text in documents
    ]
    assert demo_corpus.fitted(documents, limit * 2) == documents
