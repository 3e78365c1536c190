"""Reader of generation_config.json: the sampling defaults of a checkpoint's authors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files.checkpoint_folder import has_entry
from ..checkpoint.files.json_fields import JsonFields, read_json
from ..errors import CheckpointError, InvalidRequest
from ..sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults (None: not stated), and every id that this file or config.json ends a sequence with.

    If do_sample is False, decoding is greedy and the other fields have no effect.
    """

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the stated defaults as keyword arguments of SamplingParams; `do_sample` false gives temperature 0."""
        stated = {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}
        if self.do_sample is False:
            stated["temperature"] = 0.0
        return stated


def end_token_ids(stated: tuple[int, ...], tokenizer_eos: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return every id that ends a response: those that the configurations state, and the tokenizer's own end of
    sequence.

    Fine-tunes often change only one of the files, so each of them counts. A token beyond the model's vocabulary, which
    no model can give, does not.
    """
    own = () if tokenizer_eos is None or tokenizer_eos >= vocab_size else (tokenizer_eos,)
    return _unique_ids(*stated, *own)


def read_generation_config(folder: Path, vocab_size: int, config_eos: tuple[int, ...]) -> GenerationDefaults:
    """Read the folder's generation_config.json; without it there are only config.json's EOS ids. Raises CheckpointError
    naming the key.
    """
    if not has_entry(folder, GENERATION_CONFIG):
        return GenerationDefaults(eos_token_ids=config_eos)
    fields = JsonFields(read_json(folder, GENERATION_CONFIG), GENERATION_CONFIG)
    stated = {name: fields.raw[name] for name in _NAMES if name in fields}
    try:
        SamplingParams(**stated)
    except InvalidRequest as error:
        raise CheckpointError(error.message, file=GENERATION_CONFIG) from error
    return GenerationDefaults(
        eos_token_ids=_unique_ids(*fields.integers("eos_token_id", 0, vocab_size - 1), *config_eos),
        do_sample=fields.boolean("do_sample", False) if "do_sample" in fields else None,
        **stated,
    )


def _unique_ids(*token_ids: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_ids))
