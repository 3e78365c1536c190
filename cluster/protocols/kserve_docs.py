"""KServe's routes for the description of the interface."""

from __future__ import annotations

from ...replicas.errors import NotFound
from ...replicas.sampling_params import MAX_LOGPROBS
from ..web.openapi import Operation, Operations, Schema, answer, body
from .kserve_ask import DEFAULT_PRIORITY, INPUTS, PRIORITY_LEVELS
from .kserve_reply import OUTPUTS
from .openai_table import SAMPLING

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_AS_JSON = "; a JSON list or object, as a string"
_PARAMETERS: dict[str, Schema] = {
    **{field.name: {**field.schema, "description": field.doc} for field in SAMPLING},
    "stop": {**_TEXT, "description": "one string that ends a choice and is no part of it; several: input `stop`"},
    "stop_token_ids": {**_TEXT, "description": f"ids that end a choice{_AS_JSON}"},
    "logit_bias": {**_TEXT, "description": f"token id -> added to its logit, -100 to 100{_AS_JSON}"},
    "max_tokens": {"type": "integer", "minimum": 1, "description": "default: until the context is full"},
    "logprobs": {**_COUNT, "maximum": MAX_LOGPROBS, "description": "alternatives beside each output token"},
    "prompt_logprobs": {**_COUNT, "maximum": MAX_LOGPROBS, "description": "likewise for the prompt"},
    "json_object": {"type": "boolean", "default": False, "description": "the text is a JSON object"},
    "json_schema": {**_TEXT, "description": "the text follows this JSON schema"},
    "regex": {**_TEXT, "description": "the whole text matches"},
    "grammar": {**_TEXT, "description": "GBNF, its rule `root` being the whole text"},
    "structural_tag": {**_TEXT, "description": f"text with constrained parts{_AS_JSON}"},
    "choice": {**_TEXT, "description": f"the text is one of these{_AS_JSON}"},
    "priority": {**_COUNT, "maximum": PRIORITY_LEVELS, "default": 0, "description":
                 f"1 runs first, {PRIORITY_LEVELS} last; 0: {DEFAULT_PRIORITY}"},
    "timeout": {**_COUNT, "default": 0, "description": "microseconds after which it ends with 504; 0: none"},
}  # fmt: skip
_INPUTS = (
    "text_input BYTES [1] or input_ids INT32|INT64 [n], the prompt; optional: streaming BOOL [1] (false here), "
    "stop BYTES [1 to 4], stop_token_ids INT32|INT64 [n]"
)
_TENSOR: Schema = {
    "type": "object",
    "required": ["name", "shape", "datatype", "data"],
    "additionalProperties": False,
    "properties": {
        "name": {"enum": list(INPUTS)},
        "shape": {"type": "array", "minItems": 1, "maxItems": 2, "items": _COUNT, "description": "[n] or [1, n]"},
        "datatype": {"enum": ["BYTES", "BOOL", "INT32", "INT64"]},
        "data": {"type": "array", "description": "strings, true or false, integers; rows may be lists of their own"},
        "parameters": {"type": "null"},
    },
}
_WANTED: Schema = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {"name": {"enum": list(OUTPUTS)}, "parameters": {"type": "null"}},
}
_INFER = body(
    {
        "id": {**_TEXT, "description": "the client's own, echoed"},
        "parameters": {"type": "object", "additionalProperties": False, "properties": _PARAMETERS},
        "inputs": {"type": "array", "items": _TENSOR, "description": _INPUTS},
        "outputs": {"type": "array", "items": _WANTED, "description": "default: text_output, finish_reason, and what "
                    "the parameters ask for"},
    },
    ["inputs"],
)  # fmt: skip
_OUTPUT: Schema = {
    "type": "object",
    "required": ["name", "datatype", "shape", "data"],
    "properties": {
        "name": {"enum": list(OUTPUTS)},
        "datatype": {"enum": ["BYTES", "INT32", "FP32"]},
        "shape": {"type": "array", "items": _COUNT},
        "data": {"type": "array", "description": "flat; null where there is no number"},
    },
}
_TOTALS = ("prompt_tokens", "completion_tokens", "cached_tokens", "seed")
_INFERRED = answer(
    model_name=_TEXT,
    model_version=_TEXT,
    id=_TEXT,
    parameters=answer(**{name: {"type": "integer"} for name in _TOTALS}),
    outputs={"type": "array", "items": _OUTPUT},
)
_METADATA = answer(name=_TEXT, platform=_TEXT, inputs={"type": "array"}, outputs={"type": "array"})
_READY = answer(name=_TEXT, ready={"const": True})
_ERROR = answer(error={"type": ["string", "object"], "description": "an object where the call was refused at the door"})

_MODEL, _VERSIONED = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{number}"


def _of_model(path: str) -> Operations:
    return {
        ("GET", path): Operation("A model's tensors", _METADATA, error=_ERROR, more=(NotFound,)),
        ("GET", f"{path}/ready"): Operation("Whether a model is ready", _READY, error=_ERROR, more=(NotFound,)),
        ("POST", f"{path}/infer"): Operation(
            "Generate, in tensors", _INFERRED, _INFER, engine=True, error=_ERROR, more=(NotFound,)
        ),
    }


OPERATIONS: Operations = {
    ("GET", "/v2"): Operation("What server this is", answer(name=_TEXT, version=_TEXT, extensions={"type": "array"})),
    ("GET", "/v2/health/live"): Operation("Whether the process lives", answer(live={"const": True})),
    ("GET", "/v2/health/ready"): Operation(
        "Whether a replica's engine goes round", answer(ready={"const": True}), error=_ERROR
    ),
    **_of_model(_MODEL),
    **_of_model(_VERSIONED),
}
