"""Inputs of the digests in stores and caches: class and field names count, so that they may not change unnoticed.

A model's fingerprint and the identity of its KV are written into Redis, into kept weights and into what fleets compare.
A new value here means that everything stored by an older version is not found any more: that has to be said in the
notes of a release, and never follows from a new name.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.checkpoint.files.safetensors_header import TensorInfo
from motley.replicas.kv.store.sealed_record import Geometry
from motley.replicas.kv.store.store_keys import StoreKeys, kv_identity
from motley.replicas.loading.cached_digests import model_fingerprint
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.rotary_embedding import RopeConfig
from motley.replicas.quantization.awq import AWQ
from motley.replicas.quantization.dense import Dense
from motley.replicas.quantization.fp8 import FP8
from motley.replicas.quantization.gptq import GPTQ

STATED = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "tie_word_embeddings": True,
    "dtype": "bfloat16", "eos_token_id": [1, 2],
}  # fmt: skip
CONFIG = replace(read_config(JsonFields(STATED, "config.json")), rope=RopeConfig("yarn", 1e6, 4.0, 32))


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (Dense(), "a9f97b3538c6cfbf532974995b211de3d98afaa5a1ad573a2598bdea2237c012"),
        (
            GPTQ(4, 128, sym=False, unconverted=("lm_head",)),
            "8c0d8041b30a51c44714c80fa27a11e94c8735e29bee8df24859fc4a5af81d79",
        ),
        (AWQ(128, bits=4), "b68513bc5bcc065c1df70711af38c34c2aa8be4eaaa1cafea153a566443ff0c5"),
        (FP8(True, ("lm_head",)), "c5ccca7c66348ae7ace291fdcf7d6756769a4ddef87b63f5aafa0db167ce606f"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_models_fingerprint(format: Any, expected: str) -> None:
    info = TensorInfo("BF16", (64, 32), 0, 4096)
    described = SimpleNamespace(config=CONFIG, format=format, tensors={"model.embed_tokens.weight": (None, info)})
    contents = {"model.embed_tokens.weight": hashlib.sha256(b"values").digest()}
    assert model_fingerprint(cast(Any, described), contents) == expected


def test_the_identity_of_kv_and_its_keys() -> None:
    geometry = Geometry("int8", layers=2, heads=4, head_dim=8, tokens=16)
    found = kv_identity("model", geometry, "bf16", "cpu-avx512")
    assert found.hex() == "633528c876bafe24d12e1cc8a533ee145c06d2582af0a7dd640e811205d7bab1"
    assert (
        kv_identity("model", geometry, "bf16", None).hex()
        == "ec53156b255e10c5d1b97da178410e2354dc60d03181474e687c0a6abd3a1ce1"
    )
    assert StoreKeys(b"secret", found).name == "f4068bdd857134ae"
