"""Registry of model families by the architecture that checkpoints name. A new family is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from ...checkpoint.files.json_fields import JsonFields
from ...errors import CheckpointError
from ..config_synonyms import check_alternative_keys, check_key_pairs
from ..model_config import ModelConfig
from . import llama, mistral, qwen2, qwen3

FAMILIES: dict[str, Callable[[JsonFields], ModelConfig]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
}
_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}


def read_config(config: JsonFields) -> ModelConfig:
    """Return the decoder that a config.json describes. Raises CheckpointError naming the key at fault."""
    if config.raw.get("auto_map") not in (None, {}):
        raise CheckpointError(
            "the checkpoint wants its own code run, which is never done; use a checkpoint of one of "
            + ", ".join(FAMILIES),
            file=config.file,
            tensor="auto_map",
        )
    family = FAMILIES[_architecture(config)]
    check_key_pairs(config)
    model = family(config)
    check_alternative_keys(config, model)
    return model


def architecture_name(family: str) -> str:
    """Return the name of the architecture in checkpoints of this family, such as "LlamaForCausalLM"."""
    return _BY_MODEL_TYPE[family]


def _architecture(config: JsonFields) -> str:
    names = config.raw.get("architectures")
    if names is None:
        return _BY_MODEL_TYPE[config.choice("model_type", tuple(_BY_MODEL_TYPE))]
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise config.error("architectures", "one of " + ", ".join(FAMILIES))
    return name
