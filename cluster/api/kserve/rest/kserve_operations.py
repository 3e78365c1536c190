"""KServe's routes for the description of the interface."""

from __future__ import annotations

from .....replicas.errors import NotFound
from .....replicas.sampling_params import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from ....request_errors import BodyTooLarge
from ....transport.http_server.openapi import HttpOperation, Operations, Schema, request_object, response_object
from ...common.fields.empty_values import EMPTY, accepts_value
from ...common.fields.field_schemas import COUNT, INT32, NULL, SOME_TEXT, TEXT, TRUTH, list_schema, with_description
from ...common.fields.field_table import SAMPLING
from ...common.fields.foreign_fields import NO_BOUND
from ..kserve_numbers import DECIMAL, INTEGER, NUMBERS
from ..kserve_parameters import NO_WORDS, values_of_nothing
from ..kserve_request import DEFAULT_PRIORITY, EMPTY_FINAL, INPUTS, PRIORITY_LEVELS, VERSION
from ..kserve_response import OUTPUTS
from ..kserve_sampling import SAMPLING_PARAMETERS
from ..kserve_tensors import BINARY_OUTPUT
from .kserve_generate import NEUTRAL, RENAMED

_STOP: Schema = {**SOME_TEXT, "maxLength": MAX_STOP_CHARS}
_AS_JSON = "; a JSON list or object, as a string"
_OBJECT_OR_TEXT: Schema = {"type": ["object", "string", "null"]}
_TOGETHER = "a JSON object or its text: its fields count as parameters, as Triton's vLLM backend has it"
_PARAMETERS: dict[str, Schema] = {
    **{field.name: {**field.schema, "description": field.doc} for field in SAMPLING},
    "stop": {**_STOP, "description": "one string that ends a choice and is no part of it; several: input `stop`"},
    "stop_token_ids": {**TEXT, "description": f"ids that end a choice{_AS_JSON}"},
    "allowed_token_ids": {**TEXT, "description": f"no other token is chosen; not with a form of the text{_AS_JSON}"},
    "bad_words": {**TEXT, "description": f"texts whose tokens are never chosen one after the other{_AS_JSON}"},
    "logit_bias": {**TEXT, "description": f"token id -> added to its logit, -100 to 100; or pairs of such{_AS_JSON}"},
    "do_sample": {"type": "boolean", "default": True, "description":
                  "false: greedy, as temperature 0; not beside a temperature other than 0 and 1"},
    "max_tokens": {"anyOf": [{"const": NO_BOUND}, {"type": "integer", "minimum": 1, "maximum": INT32}], "description":
                   "tokens of the output; -1: no bound; default: until the context is full"},
    "logprobs": {"anyOf": [{**COUNT, "maximum": MAX_LOGPROBS}, TRUTH], "description":
                 "alternatives beside each output token; true: none, or as many as another name of it says"},
    "prompt_logprobs": {**COUNT, "maximum": MAX_LOGPROBS, "description": "likewise for the prompt"},
    "json_object": {"type": "boolean", "default": False, "description": "the text is a JSON object"},
    "json_schema": {**SOME_TEXT, "description": "the text follows this JSON schema"},
    "regex": {**SOME_TEXT, "description": "the whole text matches"},
    "grammar": {**SOME_TEXT, "description": "GBNF, its rule `root` being the whole text"},
    "structural_tag": {**SOME_TEXT, "description": f"text with constrained parts{_AS_JSON}"},
    "choice": {**TEXT, "description": f"the text is one of these{_AS_JSON}"},
    "priority": {**COUNT, "maximum": PRIORITY_LEVELS, "default": 0, "description":
                 f"1 runs first, {PRIORITY_LEVELS} last; 0: {DEFAULT_PRIORITY}"},
    "timeout": {**COUNT, "maximum": 86_400_000_000, "default": 0, "description":
                "microseconds after which it ends with 504; 0: none"},
    SAMPLING_PARAMETERS: {**_OBJECT_OR_TEXT, "description": _TOGETHER},
    EMPTY_FINAL: {"const": False, "description": "of streams, which are over gRPC"},
}  # fmt: skip


def _open(schema: Schema) -> Schema:
    """Return the schema without a ban on other fields: unknown ones are treated by --unknown-fields."""
    return {key: value for key, value in schema.items() if key != "additionalProperties"}


def _written(name: str, schema: Schema) -> Schema:
    """Return the schema of a parameter with the text of a number, and the values that count as leaving it out."""
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    kinds = list(rest["anyOf"]) if "anyOf" in rest else [rest]
    if name in NUMBERS or RENAMED.get(name) in NUMBERS:
        whole = any(kind.get("type") == "integer" for kind in kinds)
        kinds.append({"type": "string", "pattern": f"^{INTEGER if whole else DECIMAL}$"})
    nothing = [value for value in values_of_nothing(name) if isinstance(value, str | list | dict)]
    if more := [value for value in nothing if value not in EMPTY or not any(accepts_value(k, value) for k in kinds)]:
        kinds.append({"enum": more})
    return schema if kinds == [rest] else {"anyOf": kinds, **about}


_BINARY_OUTPUT: Schema = {
    "type": "boolean", "default": False, "description": "outputs in binary, behind the JSON"
}  # fmt: skip
_SINGLE: Schema = {"enum": [[1], [1, 1]], "description": "[1] or [1, 1]; of ids and stops [n] or [1, n]"}
_VECTOR: Schema = {"type": "array", "minItems": 1, "maxItems": 2, "items": COUNT, "description": "[n] or [1, n]"}
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": INT32}


def _input(name: str, shape: Schema, element: Schema, about: str, **bounds: int) -> Schema:
    """Return the schema of an input tensor; its elements may be nested in rows of their own."""
    flat = {**list_schema(element), **bounds}
    return request_object(
        {
            "name": {"const": name, "description": about},
            "shape": shape,
            "datatype": {"enum": list(INPUTS[name]), "description": "of its elements"},
            "data": {
                "anyOf": [flat, {**list_schema(flat), "minItems": 1, "maxItems": 1}],
                "description": "its elements, flat or as one row",
            },
            "parameters": with_description(
                request_object(
                    {
                        "binary_data_size": with_description(
                            NULL, "of a tensor behind the JSON: its bytes; then no `data`"
                        )
                    }
                ),
                "none without binary data",
            ),
        },
        ["name", "shape", "datatype", "data"],
    )


_ONE = {"minItems": 1, "maxItems": 1}
_INPUTS = (
    _input("text_input", _SINGLE, SOME_TEXT, "the prompt; or input_ids", **_ONE),
    _input("input_ids", _VECTOR, _ID, "the prompt; or text_input", minItems=1),
    _input("streaming", _SINGLE, {"const": False}, "true only over gRPC", **_ONE),
    _input("stop", _VECTOR, _STOP, "strings that end a choice", maxItems=MAX_STOP_STRINGS),
    _input("stop_token_ids", _VECTOR, _ID, "ids that end a choice"),
    _input(SAMPLING_PARAMETERS, _SINGLE, TEXT, _TOGETHER, **_ONE),
    _input("stream", _SINGLE, {"const": False}, "`streaming`", **_ONE),
    _input("exclude_input_in_output", _SINGLE, {"const": True}, "text_output is the answer alone", **_ONE),
)
_REQUESTED_OUTPUT = request_object(
    {
        "name": {"enum": list(OUTPUTS), "description": "of the tensor"},
        "parameters": with_description(
            request_object(
                {
                    "binary_data": with_description(
                        {"type": "boolean"}, "whether in binary; default: `binary_data_output`"
                    ),
                    "classification": {"const": 0, "description": "no output is a distribution"},
                }
            ),
            "how it is wanted",
        ),
    },
    ["name"],
)
_INFER = request_object(
    {
        "id": with_description(TEXT, "the client's own, echoed"),
        "model_name": with_description(TEXT, "that of the path, or none"),
        "model_version": with_description({"enum": ["", VERSION]}, "that of the path, or none"),
        "parameters": {
            **_open(
                request_object(
                    {name: _written(name, one) for name, one in _PARAMETERS.items()} | {BINARY_OUTPUT: _BINARY_OUTPUT}
                )
            ),
            "description": "how tokens are chosen, by the names of completions, and what else belongs to the request; "
            "others' names as of completions, where they are one value",
        },
        "inputs": with_description(list_schema({"anyOf": list(_INPUTS)}), "each at most once, and just one prompt"),
        "outputs": with_description(
            list_schema(_REQUESTED_OUTPUT),
            "each once; default: text_output, finish_reason, and what the parameters ask for",
        ),
    },
    ["inputs"],
)
_OUTPUT = response_object(
    {
        "data": with_description(
            list_schema({"type": ["string", "number", "null"]}), "flat; null where there is no number; none in binary"
        ),
        "parameters": with_description(
            response_object(binary_data_size=with_description(COUNT, "bytes of it behind the JSON")),
            "of an output in binary",
        ),
    },
    name={"enum": list(OUTPUTS), "description": "as asked for"},
    datatype={"enum": ["BYTES", "INT32", "FP32"], "description": "of its elements"},
    shape=with_description(list_schema(COUNT), "as the package `inference` below lists them"),
)
_STATISTIC = response_object(
    count=with_description(COUNT, "how many"), ns=with_description(COUNT, "nanoseconds of all of them together")
)
_STATISTICS = response_object(
    model_stats=with_description(
        list_schema(
            response_object(
                name=with_description(TEXT, "the name that is served"),
                version=with_description(TEXT, "there is one"),
                last_inference=with_description(COUNT, "milliseconds since 1970; 0: there was none"),
                inference_count=with_description(COUNT, "requests that succeeded"),
                execution_count=with_description(COUNT, "the same"),
                inference_stats=with_description(
                    response_object(
                        success=with_description(_STATISTIC, "of requests that succeeded"),
                        fail=with_description(_STATISTIC, "of all others"),
                        queue=with_description(_STATISTIC, "0: it is not told apart"),
                        compute_input=with_description(_STATISTIC, "0, likewise"),
                        compute_infer=with_description(_STATISTIC, "as `success`"),
                        compute_output=with_description(_STATISTIC, "0, likewise"),
                        cache_hit=with_description(_STATISTIC, "0: no answer is kept"),
                        cache_miss=with_description(_STATISTIC, "0, likewise"),
                    ),
                    "of KServe's protocol, HTTP and gRPC, by the ingress that answers",
                ),
                batch_stats=with_description(list_schema({"type": "object"}), "none"),
            )
        ),
        "of the one model",
    )
)
_INDEX = {
    "type": "array",
    "items": response_object(
        name=with_description(TEXT, "the name that is served"),
        version=with_description(TEXT, "there is one"),
        state={"enum": ["READY", "UNAVAILABLE"], "description": "whether a replica answers"},
        reason=with_description(TEXT, "why none does; else empty"),
    ),
}
_PLAIN: dict[str, Schema] = {
    **{name: {"type": "object"} for name in ("json_schema", "structural_tag")},
    "logit_bias": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "array"}}]},
    "choice": {**list_schema(SOME_TEXT), "minItems": 1, "maxItems": 1024},
    "bad_words": {**list_schema({**SOME_TEXT, "maxLength": MAX_BAD_WORD_CHARS}), "maxItems": MAX_BAD_WORDS},
    "allowed_token_ids": {**list_schema(_ID), "maxItems": MAX_ALLOWED_IDS},
}
_IN_PLAIN_JSON: dict[str, Schema] = {
    **_PARAMETERS,
    "stop": {"anyOf": [_STOP, {**list_schema(_STOP), "maxItems": MAX_STOP_STRINGS}],
             "description": "strings that end a choice and are no part of it"},
    "stop_token_ids": {"anyOf": [TEXT, list_schema(_ID)], "description": f"ids that end a choice, as a list{_AS_JSON}"},
    **{name: {"anyOf": [TEXT, plain], "description": f"{_PARAMETERS[name]['description']}, or as it is"}
       for name, plain in _PLAIN.items()},
    "end_id": {**_ID, "description": "one more id that ends the answer"},
    "pad_id": {"description": "changes nothing", "type": ["integer", "string", "null"]},
    "random_seed": {**_PARAMETERS["seed"], "description": "`seed`"},
    "min_length": {**_PARAMETERS["min_tokens"], "description": "`min_tokens`"},
    "stop_words": {"anyOf": [{"enum": list(NO_WORDS)}, _STOP,
                             {**list_schema(_STOP), "minItems": 1, "maxItems": MAX_STOP_STRINGS}],
                             "description": "`stop`"},
    **{name: {"enum": [*values, *(str(one) for one in values if type(one) is int)],
              "description": f"else refused: {instead}"}
       for name, (values, instead) in NEUTRAL.items()},
}  # fmt: skip


def _generate(stream: Schema) -> Schema:
    schemas = {name: _written(name, one) for name, one in _IN_PLAIN_JSON.items()} | {"stream": stream}
    body = request_object(
        {
            "id": with_description(TEXT, "the client's own, echoed"),
            "text_input": with_description(SOME_TEXT, "the prompt"),
            "parameters": with_description(
                _open(request_object(schemas)), "as those of `infer`; each may stand beside text_input instead"
            ),
            **{name: {"description": "in `parameters` or here", **schema} for name, schema in schemas.items()},
        },
        ["text_input"],
    )
    return _open(body)


_GENERATE = _generate({"const": False, "description": "true only with generate_stream"})
_STREAM = _generate({"type": "boolean", "default": True, "description": "whether there are several events"})
_SOME_TEXTS: Schema = {"anyOf": [TEXT, list_schema(TEXT)]}
_FACTS = {
    "max_model_len": "tokens of a prompt and its answer together",
    "vocab_size": "how many token ids there are",
    "eos_token_ids": "that end an answer, with commas",
    "dtype": "of what is computed",
    "quantization": "of the weights",
}
_TOTALS = {
    "prompt_tokens": "of the prompt",
    "completion_tokens": "of all choices",
    "cached_tokens": "those of the prompt that were not computed again",
    "seed": "the one asked for, or the one that was drawn: it repeats the answer",
}
_WEIGHTS = with_description(
    TEXT,
    "that it was made with, as VERSION:DIGEST; several, in their order, if it went on where no replica had the same",
)
_NAMED = with_description(TEXT, "the name that is served")
_INFERRED = response_object(
    model_name=_NAMED,
    model_version=with_description(TEXT, "there is one"),
    id=with_description(TEXT, "the client's own, echoed; else empty"),
    parameters=with_description(
        response_object(
            {"weights": _WEIGHTS},
            **{name: with_description({"type": "integer"}, about) for name, about in _TOTALS.items()},
        ),
        "of the whole request",
    ),
    outputs=with_description(list_schema(_OUTPUT), "the tensors"),
)
_TENSOR = response_object(
    name=with_description(TEXT, "of the tensor"),
    datatype=with_description(TEXT, "of its elements"),
    shape=with_description(list_schema({"type": "integer"}), "-1 for what varies"),
)
_METADATA = response_object(
    name=_NAMED,
    versions=with_description(list_schema(TEXT), "there is one"),
    platform=with_description(TEXT, "who computes it"),
    inputs=with_description(list_schema(_TENSOR), "what it takes"),
    outputs=with_description(list_schema(_TENSOR), "what it can give"),
)
_PLACE = with_description(list_schema({"type": "integer"}), "-1 for what varies")
_TYPE = with_description(TEXT, "Triton's name of its elements' type")
_INPUT_CONFIG = response_object(
    name=with_description(TEXT, "of the tensor"),
    data_type=_TYPE,
    dims=_PLACE,
    optional={"const": True, "description": "which of them a request needs is told above"},
)
_CONFIG = response_object(
    name=_NAMED,
    platform=with_description(TEXT, "who computes it"),
    backend=with_description(TEXT, "the same"),
    input=with_description(list_schema(_INPUT_CONFIG), "what it takes"),
    output=with_description(
        list_schema(response_object(name=with_description(TEXT, "of the tensor"), data_type=_TYPE, dims=_PLACE)),
        "what it can give",
    ),
    dynamic_batching=with_description(
        response_object(
            priority_levels=with_description(COUNT, "how many there are"),
            default_priority_level=with_description(COUNT, "of a request that names none"),
        ),
        "of the parameter `priority`",
    ),
    parameters=with_description(
        response_object(
            **{
                name: with_description(
                    response_object(string_value=with_description(TEXT, "as text, whatever it is")), about
                )
                for name, about in _FACTS.items()
            }
        ),
        "of the model",
    ),
    model_transaction_policy=with_description(
        response_object(decoupled={"const": True, "description": "a request may have several responses, over gRPC"}),
        "how many responses a request has",
    ),
)
_READY = response_object(name=_NAMED, ready={"const": True, "description": "what is not ready is refused with 503"})
_SERVER = response_object(
    name=with_description(TEXT, "motley"),
    version=with_description(TEXT, "of Motley"),
    extensions=with_description(list_schema(TEXT), "what it speaks beside the protocol itself"),
)
_GENERATED = response_object(
    {
        "id": with_description(TEXT, "the client's own"),
        "finish_reason": with_description(_SOME_TEXTS, "stop, length or another; empty before the end"),
        **{
            name: with_description(list_schema({"type": ["number", "null"]}), f"as `infer` has it: {datatype}")
            for name, (datatype, _) in OUTPUTS.items()
            if datatype != "BYTES"
        },
    },
    model_name=_NAMED,
    model_version=with_description(TEXT, "there is one"),
    text_output=with_description(_SOME_TEXTS, "the answer, or its next part; several choices are a list"),
    parameters=with_description(
        response_object(
            {
                "weights": _WEIGHTS,
                **{name: with_description({"type": "integer"}, about) for name, about in _TOTALS.items()},
            },
        ),
        "of the whole request; in the last event of a stream",
    ),
)
_ERROR = response_object(error=with_description(TEXT, "what is wrong, and what is accepted"))

_MODEL, _VERSIONED = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{number}"


def _of_model(path: str) -> Operations:
    return {
        ("GET", path): HttpOperation("A model's tensors", _METADATA, error=_ERROR, more=(NotFound,)),
        ("GET", f"{path}/config"): HttpOperation("How a model is served", _CONFIG, error=_ERROR, more=(NotFound,)),
        ("GET", f"{path}/ready"): HttpOperation("Whether a model is ready", _READY, error=_ERROR, more=(NotFound,)),
        ("POST", f"{path}/infer"): HttpOperation(
            "Generate, in tensors", _INFERRED, _INFER, engine=True, error=_ERROR, more=(NotFound,), binary=True
        ),
        ("POST", f"{path}/generate"): HttpOperation(
            "Generate, in plain JSON", _GENERATED, _GENERATE, engine=True, error=_ERROR, more=(NotFound,)
        ),
        ("POST", f"{path}/generate_stream"): HttpOperation(
            "Generate, as events without a `[DONE]`",
            _GENERATED,
            _STREAM,
            chunk=_GENERATED,
            engine=True,
            error=_ERROR,
            more=(NotFound,),
        ),
        ("GET", f"{path}/stats"): HttpOperation("What was served", _STATISTICS, error=_ERROR, more=(NotFound,)),
    }


OPERATIONS: Operations = {
    ("GET", "/v2"): HttpOperation("What server this is", _SERVER, error=_ERROR),
    ("GET", "/v2/health/live"): HttpOperation(
        "Whether the process lives",
        response_object(live={"const": True, "description": "what does not live answers nothing"}),
        error=_ERROR,
    ),
    ("GET", "/v2/health/ready"): HttpOperation(
        "Whether a replica's engine goes round", response_object(ready=_READY["properties"]["ready"]), error=_ERROR
    ),
    ("POST", "/v2/repository/index"): HttpOperation(
        "Which models there are",
        _INDEX,
        request_object(
            {"ready": with_description({"type": "boolean", "default": False}, "those alone that are ready")}
        ),
        error=_ERROR,
        bodiless=True,
    ),
    ("GET", "/v2/models/stats"): HttpOperation("What was served", _STATISTICS, error=_ERROR),
    **_of_model(_MODEL),
    **_of_model(_VERSIONED),
}
REFUSED = HttpOperation("Refused: there is no such API here", None, error=_ERROR, more=(NotFound, BodyTooLarge))
