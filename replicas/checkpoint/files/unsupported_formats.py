"""Model files of other formats, which are not read here: errors name what they are and what their owner can do.

Every reader of a folder (serve, generate, fit, a live roll) asks here first, so that each gives the same error. The
next kind is one line in a table; the words stand behind "is" in the error, and end with the remedy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...errors import CheckpointError
from ...short_repr import short_repr
from .checkpoint_folder import has_entry, read_checkpoint_file
from .json_fields import JsonFields, read_json

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
USE_ORIGINAL_MODEL = (
    "give the folder or Hugging Face id of the model that it was made from, in safetensors, or of a version of that "
    "model in GPTQ, AWQ or FP8"
)
USE_TRANSFORMERS_FORMAT = (
    "give the version of this model that transformers reads: config.json, *.safetensors and tokenizer.json"
)

_OLD_GGML = "a file of llama.cpp's older kind, from before GGUF, which is not read here"

# Files that stand in a model's place where a folder has no config.json, or no *.safetensors.
UNSUPPORTED_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "*.gguf": f"a GGUF file, of llama.cpp, Ollama and LM Studio, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.ggml": f"{_OLD_GGML}; {USE_ORIGINAL_MODEL}",
        "ggml-*.bin": f"{_OLD_GGML}; {USE_ORIGINAL_MODEL}",
        "consolidated*.safetensors": (
            f"a checkpoint as Mistral publishes it, not as transformers has it; {USE_TRANSFORMERS_FORMAT}"
        ),
        "consolidated*.pth": (
            f"a checkpoint as Meta publishes it, not as transformers has it; {USE_TRANSFORMERS_FORMAT}"
        ),
        "params.json": f"the config of a checkpoint as Meta or Mistral publish it; {USE_TRANSFORMERS_FORMAT}",
        "mlc-chat-config.json": f"a model compiled for MLC, which is not read here; {USE_ORIGINAL_MODEL}",
        "model_index.json": "the index of a pipeline of diffusers, and not a language model; give a language model",
        "*.onnx": f"a model in ONNX, which is not read here; {USE_ORIGINAL_MODEL}",
        "openvino_model.xml": f"a model in OpenVINO's format, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.mlpackage": f"a model for Core ML, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.engine": f"an engine built by TensorRT for one GPU, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.nemo": f"an archive of NeMo, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.llamafile": f"a program of llamafile with a GGUF in it, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.tflite": f"a model for TensorFlow Lite, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.task": f"a bundle for MediaPipe, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.litertlm": f"a bundle for LiteRT-LM, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.pte": f"a program for ExecuTorch, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.mnn": f"a model for MNN, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.rkllm": f"a model for Rockchip's RKLLM, which is not read here; {USE_ORIGINAL_MODEL}",
        "*.msgpack": f"weights for Flax, which are not read here; {USE_TRANSFORMERS_FORMAT}",
        "*.h5": f"weights for TensorFlow, which are not read here; {USE_TRANSFORMERS_FORMAT}",
        "model.bin": f"weights of CTranslate2 or a pickle, which are not read here; {USE_TRANSFORMERS_FORMAT}",
    }
)
# First bytes of a file -> its line in UNSUPPORTED_MODELS: ggml, ggmf, ggjt and ggla as little-endian numbers.
_MAGIC = {b"GGUF": "*.gguf", b"lmgg": "*.ggml", b"fmgg": "*.ggml", b"tjgg": "*.ggml", b"algg": "*.ggml"}
# Files that show the kind of the weights beside them, whatever other files are there.
UNSUPPORTED_MARKER_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "quanto_qmap.json": (
            f"the map of a model that optimum-quanto quantized, which is not read here; {USE_ORIGINAL_MODEL}"
        ),
        "quantization_map.json": (
            f"the map of a model that optimum-quanto quantized, which is not read; {USE_ORIGINAL_MODEL}"
        ),
    }
)
# `quant_method` of config.json -> description of the method.
UNSUPPORTED_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aqlm": "AQLM, with codebooks",
        "awq_marlin": "AWQ whose tensors lie as the kernel Marlin reads them",
        "bitblas": "BitBLAS",
        "bitnet": "BitNet, with ternary weights",
        "bitsandbytes": "bitsandbytes: NF4, FP4 or LLM.int8",
        "deepspeedfp": "DeepSpeed's FP6 or FP8",
        "eetq": "EETQ",
        "exl2": "ExLlamaV2",
        "exl3": "ExLlamaV3",
        "fbgemm_fp8": "FBGEMM's FP8",
        "fouroversix": "Four over six, an FP4",
        "fp_quant": "FP-Quant",
        "gguf": "GGUF within safetensors",
        "gptq_bitblas": "GPTQ whose tensors lie as the kernels of BitBLAS read them",
        "gptq_marlin": "GPTQ whose tensors lie as the kernel Marlin reads them",
        "gptq_marlin_24": "GPTQ with two of four weights, as the kernel Marlin reads them",
        "higgs": "HIGGS",
        "hqq": "HQQ, with zero points that are not whole",
        "intel/auto-round": "auto-round's own, as its first versions wrote it",
        "marlin": "GPTQ whose tensors lie as the kernel Marlin reads them",
        "modelopt": "NVIDIA's ModelOpt",
        "modelopt_fp4": "NVIDIA's ModelOpt",
        "mxfp4": "MXFP4",
        "qqq": "QQQ, with activations in INT8",
        "quanto": "optimum-quanto",
        "quark": "AMD's Quark",
        "sinq": "SINQ",
        "spqr": "SpQR",
        "squeezellm": "SqueezeLLM",
        "torchao": "torchao",
        "vptq": "VPTQ",
    }
)
# `packing_format` of auto-round's own files -> description of the layout, where `data_type` does not say what it holds.
PACKINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "auto_round": "GPTQ with zero points for the kernels of GPTQModel",
        "auto_round:fake": "values that were rounded and not packed, as auto-round's format `fake` saves them",
        "auto_round:fp8_static": "FP8 with scales of activations that were measured before",
        "auto_round:gptqmodel": "GPTQ with zero points for the kernels of GPTQModel",
        "auto_round:llm_compressor": "tensors as llm-compressor packs them",
        "auto_round:llm_compressor_nvfp4_e5m3": "NVFP4 with scales of e5m3",
    }
)
# How auto-round's `data_type` begins -> name of the kind, before its bits.
_MICROSCALED = {"mx_fp": "MXFP", "mx_int": "MXINT", "nv_fp": "NVFP"}
UNSUPPORTED_TOKENIZERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tekken.json": "Mistral's own vocabulary, and tokenizer.json is missing, which is read here; put the "
        "tokenizer.json of the model's Hugging Face version beside it",
        "*.tiktoken": "a vocabulary for tiktoken, and tokenizer.json is missing, which is read here; put the "
        "tokenizer.json of the model's Hugging Face version beside it",
    }
)
# `peft_type` of adapters that add to a prompt, and so cannot be made part of a model's weights (peft 0.18).
_PROMPTS = frozenset(
    ("ADAPTION_PROMPT", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")
)
_METHOD_NAMES = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr"}
_MERGED = "merge it into its base with peft's merge_and_unload, save that with save_pretrained and give the new folder"
_NOT_MERGED = "it learns what stands before the prompt and cannot be merged into weights; give a whole model"
_OF_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TIKTOKEN = (
    "a vocabulary for tiktoken under the name of one for sentencepiece, and tokenizer.json is missing, which is read "
    "here; put the tokenizer.json of the model's Hugging Face version beside it"
)
_SENTENCEPIECE = (
    "a vocabulary for sentencepiece, and tokenizer.json is missing; put the tokenizer.json of the model's Hugging Face "
    "version beside it, or let it be made from this file: install the package sentencepiece where motley is installed"
)


def refuse_unsupported_files(folder: Path) -> None:
    """Raise CheckpointError, naming what the files are, if a folder's files are no checkpoint that is read here."""
    names = _names(folder)
    if has_entry(folder, ADAPTER):
        raise CheckpointError(_adapter(folder), file=ADAPTER)
    for name in sorted(UNSUPPORTED_MARKER_FILES.keys() & set(names)):
        raise CheckpointError(f"is {UNSUPPORTED_MARKER_FILES[name]}", file=name)
    own = [name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if CONFIG not in names or not own:
        if (error := explain_models(names)) is not None:
            raise error
        inner = [name for name in names if CONFIG not in names and has_entry(folder / name, CONFIG)]
        if inner:
            raise CheckpointError(
                f"is missing; {short_repr(inner[0])}, within this folder, has one: give that", file=CONFIG
            )


def explain_models(names: Collection[str]) -> CheckpointError | None:
    """Return an error that says what these files are, if one of them fits a line of UNSUPPORTED_MODELS; the first such
    line counts.
    """
    for pattern, message in UNSUPPORTED_MODELS.items():
        if found := sorted(name for name in names if fnmatch(name, pattern)):
            return CheckpointError(f"is {message}", file=found[0])
    return None


def explain_file(path: Path) -> CheckpointError:
    """Return an error for a file that was given in place of a folder."""
    if path.suffix in (".safetensors", ".json"):
        return CheckpointError("is a file; give the folder that it lies in, with config.json", file=path.name)
    with path.open("rb") as file:
        pattern = _MAGIC.get(file.read(4))  # the names of Ollama's files do not show what they are
    if pattern is not None:
        return CheckpointError(f"is {UNSUPPORTED_MODELS[pattern]}", file=path.name)
    return explain_models([path.name]) or CheckpointError(
        "is a file; give a folder with config.json, *.safetensors and tokenizer.json", file=path.name
    )


def refuse_unsupported_config(config: JsonFields, folder: Path) -> None:
    """Raise CheckpointError for a config.json that is another library's, or whose weights are."""
    section = config.raw.get("quantization")
    if isinstance(section, dict) and "bits" in section:
        raise CheckpointError(
            f"is a model that MLX quantized, which is not read here; {USE_ORIGINAL_MODEL}",
            file=config.file,
            tensor="quantization",
        )
    if has_entry(folder, "hf_quant_config.json") and not config.says("quantization_config"):
        message = f"says that NVIDIA's ModelOpt quantized this model, which is not read here; {USE_ORIGINAL_MODEL}"
        raise CheckpointError(message, file="hf_quant_config.json")
    for key in ("builder_config", "pretrained_config"):
        if isinstance(config.raw.get(key), dict):
            message = f"is the config of a model built by TensorRT-LLM, which is not read here; {USE_ORIGINAL_MODEL}"
            raise CheckpointError(message, file=config.file, tensor=key)


def explain_method(section: JsonFields) -> CheckpointError | None:
    """Return an error that names the `quant_method` of a config, if it is a known one that is not read here; else
    None.
    """
    method = section.raw.get("quant_method")
    if method is None and (section.says("load_in_4bit") or section.says("load_in_8bit")):
        method = "bitsandbytes"  # older files have no key `quant_method`
    producer = section.raw.get("producer")
    by_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if method is None and (by_modelopt or section.says("quant_algo")):
        method = "modelopt"  # it has a key of its own in place of `quant_method`
    if not isinstance(method, str) or method not in UNSUPPORTED_METHODS:
        return None
    message = (
        f"{short_repr(method)} is not accepted: weights of this kind "
        f"({UNSUPPORTED_METHODS[method]}) are not read here; {USE_ORIGINAL_MODEL}"
    )
    return CheckpointError(message, file=section.file, tensor=section.prefix + "quant_method")


def explain_packing(section: JsonFields) -> CheckpointError | None:
    """Return an error that says what auto-round's `packing_format` is, if it is a known one that is not read here or
    says that numbers are of a kind that is not; else None.
    """
    packing, kind = section.raw.get("packing_format"), _kind(section)
    if not isinstance(packing, str) or (packing not in PACKINGS and not kind):
        return None
    kind_and_packing = ", ".join(filter(None, (kind, PACKINGS.get(packing))))
    message = (
        f"{short_repr(packing)} is not accepted: weights of this kind ({kind_and_packing}) are not read here; "
        f"{USE_ORIGINAL_MODEL}"
    )
    return CheckpointError(message, file=section.file, tensor=section.prefix + "packing_format")


def _kind(section: JsonFields) -> str:
    """Return what auto-round's `data_type`, `bits` and `act_bits` say that numbers are, where it is not read here."""
    data_type, bits, activations = (section.raw.get(key) for key in ("data_type", "bits", "act_bits"))
    name = next((name for start, name in _MICROSCALED.items() if str(data_type).startswith(start)), "")
    if name:
        return f"{name}{bits}" if isinstance(bits, int) else name
    if data_type == "int" and isinstance(activations, int) and activations < 16:
        return f"W{bits}A{activations}, whose activations are integers"
    return ""


def explain_tokenizer(folder: Path) -> CheckpointError | None:
    """Return an error for the unreadable tokenizer file that a folder has in place of tokenizer.json, if there is
    one.
    """
    names = _names(folder)
    for pattern, message in UNSUPPORTED_TOKENIZERS.items():
        if found := sorted(name for name in names if fnmatch(name, pattern)):
            return CheckpointError(f"is {message}", file=found[0])
    file = next((name for name in _OF_SENTENCEPIECE if name in names), None)
    if file is None:
        return None
    if _is_tiktoken(read_checkpoint_file(folder, file, 256 << 20)):
        return CheckpointError(f"is {_TIKTOKEN}", file=file)
    if importlib.util.find_spec("sentencepiece") is None:
        return CheckpointError(f"is {_SENTENCEPIECE}", file=file)
    return None


def _is_tiktoken(data: bytes) -> bool:
    """Return whether the data are tiktoken's: lines of a token in base64 and its rank; sentencepiece's are a protocol
    buffer.
    """
    first = data.partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit() and first[0].isascii()


def _adapter(folder: Path) -> str:
    config = read_json(folder, ADAPTER)
    base, kind = config.get("base_model_name_or_path"), config.get("peft_type", "LORA")
    of = f" of {short_repr(base)}" if isinstance(base, str) and base else ""
    method = _METHOD_NAMES.get(str(kind), str(kind)[:40])
    remedy = _NOT_MERGED if method in _PROMPTS else _MERGED
    return f"says that this is an adapter ({method}){of}, and not a whole model; {remedy}"


def _names(folder: Path) -> list[str]:
    """Return the names of the entries in a checkpoint's folder. Raises CheckpointError."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(folder)) from error
