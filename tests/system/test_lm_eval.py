"""lm_eval, as it is published, on tasks made from local data: the figures are those of the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from client_env import run_client
from serve_process import Served
from transformers import AutoModelForCausalLM

from motley.replicas.text.tokenizer.tokenizer import Tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "third_party" / "lm_eval_run.py"
EACH_TOKEN = 0.01  # nats by which the service, in its own arithmetic, may differ from transformers in fp32
pytestmark = pytest.mark.thorough  # all that lm_eval asks for takes minutes to be installed
QUESTIONS = ("The with statement", "Grüße, 世界:", "for x in", "a", "class Motley:")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
target_delimiter: ""
metadata: {{version: 1}}
"""
KINDS = {
    "choice": ("multiple_choice", "doc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"),
    "generate": (
        "generate_until",
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{choices[0]}}'\n"
        'generation_kwargs: {until: ["\\n", "\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint"], '
        "max_gen_toks: 8, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n",
    ),
    "perplexity": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: '{{question + choices[0]}}'\nmetric_list: [{metric: bits_per_byte}]\n",
    ),
}


class Reference:
    """The same checkpoint in transformers, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, context: str, continuation: str) -> tuple[float, bool, int]:
        """Log-probability of the continuation, whether it is the greedy one, and its length in tokens."""
        before, after = (self._tokenizer.encode(text) for text in (context, continuation))
        logits = self._model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor([after]).T).sum()
        return float(chosen), logits.argmax(-1).tolist() == after, len(after)

    @torch.inference_mode()
    def greedy(self, context: str) -> str:
        """The most likely next byte, as text if it is one that a task can hold."""
        logits = self._model(torch.tensor([self._tokenizer.encode(context)])).logits[0, -1]
        return self._tokenizer.decode([int(logits.argmax())], skip_special_tokens=False)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def found(service: Served, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lm_eval")
    greedy = next(c for c in (chr(i) for i in range(0x20, 0x7F)) if reference.greedy(c).isascii())
    documents = [{"question": q, "choices": [" wraps a block.", " \n", "é"], "answer": 0} for q in QUESTIONS]
    documents.append({"question": greedy, "choices": [reference.greedy(greedy), "??"], "answer": 0})
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, (kind, more) in KINDS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind) + more)
    assert run_client("lm_eval", SCRIPT.read_text(), service.http, "tiny", str(folder), "3", timeout_s=300).endswith(
        "done\n"
    )
    return dict(json.loads((folder / "results.json").read_text()))


def test_likelihoods_of_choices_are_the_models(found: dict[str, Any], reference: Reference) -> None:
    greedy = []
    for sample in found["samples"]["choice"]:
        for (context, continuation), [[reported, reported_greedy]] in zip(
            sample["arguments"], sample["resps"], strict=True
        ):
            logprob, is_greedy, length = reference(context, continuation)
            assert float(reported) == pytest.approx(logprob, abs=EACH_TOKEN * length), (context, continuation)
            assert str(reported_greedy) == str(is_greedy)
            greedy.append(is_greedy)
    assert True in greedy
    assert False in greedy
    assert len(greedy) == 3 * len(QUESTIONS) + 2


def test_likelihoods_of_whole_texts_begin_behind_an_end(found: dict[str, Any], reference: Reference) -> None:
    samples = found["samples"]["perplexity"]
    assert len(samples) == len(QUESTIONS) + 1
    for sample in samples:
        [[text]], [[reported]] = sample["arguments"], sample["resps"]
        logprob, _, length = reference("<|im_end|>", text)
        assert float(reported) == pytest.approx(logprob, abs=EACH_TOKEN * length)


def test_generations_are_what_any_client_gets(found: dict[str, Any], client: openai.OpenAI) -> None:
    samples = found["samples"]["generate"]
    for sample in samples:
        [[context, _]], [[reported]] = sample["arguments"], sample["resps"]
        answer = client.completions.create(model="tiny", prompt=context, max_tokens=8, temperature=0, stop="\n")
        assert reported == answer.choices[0].text
    assert len(samples) == len(QUESTIONS) + 1
