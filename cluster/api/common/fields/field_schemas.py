"""JSON schemas of the larger values of OpenAI's bodies: messages, tools, formats, prompts.

The check of a body takes the known fields from here. What no schema can say, that check does alone: whether two fields
go together, whether a name is one that another field defines, or whether the model's template can show it.
"""

from __future__ import annotations

from .....replicas.grammar.grammar_spec import MAX_CHOICES
from .....replicas.sampling_params import MAX_LOGIT_BIAS
from .....replicas.text.chat.chat_messages import MAX_CALLS, ROLES
from .....replicas.text.chat.chat_template import MAX_ARGUMENT_CHARS
from .....replicas.text.chat.tool_definitions import MAX_TOOLS
from ....transport.access_log import MAX_LABEL_CHARS
from ....transport.http_server.openapi import Schema, request_object
from ..logit_bias import MAX_TEXT_CHARS

MAX_PROMPTS = 128
MAX_MESSAGES = 8192
MAX_METADATA = 16
INT32 = 2**31 - 1
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THOUGHT_LEVELS = ("low", "medium", "high")  # levels of Ollama's `think`
THINKING_TYPES = ("enabled", "disabled", "adaptive")
MODES = ("auto", "none", "required")

COUNT: Schema = {"type": "integer", "minimum": 0}
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
TRUTH: Schema = {"type": "boolean"}
BOOLEAN: Schema = {"type": "boolean", "default": False}
OBJECT: Schema = {"type": "object"}
SOME_OBJECT: Schema = {"type": "object", "minProperties": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}, "minItems": 1}


def with_description(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _list(items: Schema, max_items: int | None = None, min_items: int = 1) -> Schema:
    bounds = {"minItems": min_items} if max_items is None else {"minItems": min_items, "maxItems": max_items}
    return {"type": "array", "items": items, **bounds}


def _one_of_type(kind: str, about: str, maybe: dict[str, Schema] | None = None, **fields: Schema) -> Schema:
    """Return the schema of an object with a `type`. `fields` are required, those of `maybe` are not."""
    return request_object({"type": {"const": kind, "description": about}, **fields, **(maybe or {})}, ["type", *fields])


def prompts_schema(max_prompts: int) -> Schema:
    """Return the schema of a prompt, or of a list of at most `max_prompts` prompts."""
    return {"anyOf": [SOME_TEXT, TOKEN_IDS, _list(SOME_TEXT, max_prompts), _list(TOKEN_IDS, max_prompts)]}


PROMPT = prompts_schema(MAX_PROMPTS)

_PART = request_object(
    {
        "type": {"const": "text", "description": "the only kind of part there is"},
        "text": with_description(TEXT, "what it says; the parts are joined with nothing between"),
        "prompt_cache_breakpoint": with_description(NULL, "refused: prefixes are found without marks"),
    },
    ["type", "text"],
)
_CALL = request_object(
    {
        "id": with_description(TEXT, "what the result of this call names"),
        "type": {"const": "function", "default": "function", "description": "the only kind of call there is"},
        "function": with_description(
            request_object(
                {
                    "name": with_description(TEXT, "of the tool"),
                    "arguments": with_description(
                        TEXT, "as the model wrote them, which should be JSON; default: there are none"
                    ),
                },
                ["name"],
            ),
            "what was called, and how",
        ),
        "index": with_description({"type": "integer"}, "of a piece in a stream; changes nothing"),
    },
    ["function"],
)
_MESSAGE: dict[str, Schema] = {
    "role": with_description({"enum": list(ROLES)}, "who speaks; developer is the newer name of system"),
    "content": with_description(
        {"anyOf": [TEXT, _list(_PART, min_items=0)]},
        "text, or parts of one; null only beside tool_calls. Text there that the template leaves out is a message of "
        "its own before them, unless the template does not let that be",
    ),
    "name": with_description(
        TEXT,
        "who speaks: where the template has no place for it, as an unknown field; of a tool: which one, if the "
        "template shows it",
    ),
    "tool_calls": with_description(
        _list(_CALL, MAX_CALLS), "of an assistant: what it called; the results of all must follow"
    ),
    "tool_call_id": with_description(
        TEXT, "of a tool: the call just before that this is the result of; without it, the first that has none"
    ),
    "reasoning_content": with_description(
        TEXT, "of an assistant: what it thought; templates show it or leave it out, as their authors mean it"
    ),
    "reasoning": with_description(TEXT, "the same under its newer name; where both are given they must be equal"),
}
MESSAGE_FIELDS = tuple(_MESSAGE)
MESSAGE_UNSUPPORTED = ("annotations", "audio", "function_call", "refusal")


_REFUSED = with_description(NULL, "refused where it is not null")
_NOT_HERE = with_description(NULL, "of other roles")


def _message(roles: tuple[str, ...], more: tuple[str, ...], required: str) -> Schema:
    """Return the schema of messages of these roles; fields of other roles may be null."""
    names = ("content", "name", *more)
    fields = dict.fromkeys(_MESSAGE, _NOT_HERE) | dict.fromkeys(MESSAGE_UNSUPPORTED, _REFUSED)
    fields |= {"role": {**_MESSAGE["role"], "enum": list(roles)}} | {name: _MESSAGE[name] for name in names}
    return request_object(fields, ["role", required])


_OF_ASSISTANT = ("tool_calls", "reasoning_content", "reasoning")
MESSAGES = _list(
    {
        "anyOf": [
            _message(("system", "developer", "user"), (), "content"),
            _message(("assistant",), _OF_ASSISTANT, "content"),
            _message(("assistant",), _OF_ASSISTANT, "tool_calls"),
            _message(("tool",), ("tool_call_id",), "content"),
        ]
    },
    MAX_MESSAGES,
)

TOOLS = _list(
    _one_of_type(
        "function",
        "the only kind of tool there is",
        function=with_description(
            request_object(
                {
                    "name": with_description(NAME, "one of its own"),
                    "description": with_description(TEXT, "what the model is told that it does"),
                    "parameters": with_description(
                        {
                            "type": "object",
                            "properties": {"type": {"const": "object", "description": "arguments go by name"}},
                        },
                        "a JSON schema of the arguments; default: there are none",
                    ),
                    "strict": with_description(BOOLEAN, "true: arguments are held to their schema, or it is refused"),
                },
                ["name"],
            ),
            "what can be called",
        ),
    ),
    MAX_TOOLS,
)
_NAMED = _one_of_type(
    "function",
    "this one",
    function=with_description(
        request_object({"name": with_description(TEXT, "of one of the tools")}, ["name"]), "which one"
    ),
)
_ALLOWED = request_object(
    {
        "mode": with_description({"enum": ["auto", "required"]}, "required: the model calls at least one of them"),
        "tools": with_description(_list(_NAMED), "the model is told of these alone"),
    },
    ["mode", "tools"],
)
_SOME = _one_of_type(
    "allowed_tools",
    "function: this one is called; allowed_tools: some of them may be",
    allowed_tools=with_description(_ALLOWED, "which tools, and whether one must be called"),
)
TOOL_CHOICE: Schema = {"anyOf": [{"enum": list(MODES)}, _SOME, _NAMED]}

_UNENFORCED = "that names which additionalProperties lets in may come twice"
_JSON_SCHEMA = request_object(
    {
        "name": with_description({"anyOf": [NAME, {"const": ""}]}, "for the client's own use; changes nothing"),
        "description": with_description(TEXT, "changes nothing: what the text is for is said in the messages"),
        "schema": with_description(OBJECT, "a JSON schema"),
        "strict": with_description(
            BOOLEAN,
            "true: a keyword of the schema that cannot be kept to is refused; false: it is left out. All else is kept "
            f"to, but {_UNENFORCED}",
        ),
    },
    ["schema"],
)
JSON_SCHEMA_FIELDS = tuple(_JSON_SCHEMA["properties"])
_FORMAT = "text: free text; json_object and json: any JSON object; the others: what the field of that name says"
_TAG = "text with constrained parts, as xgrammar describes it; schemas within are kept to as those that stand alone"
_ANY = "a JSON schema; none: any object"
_SCHEMA = {
    "schema": with_description(OBJECT, _ANY),
    "value": with_description({"anyOf": [OBJECT, SOME_TEXT]}, "the same in TGI's words, or its text"),
}
_MATCHES = with_description(SOME_TEXT, "the whole text matches")
_STRUCTURE = request_object(
    {
        "begin": with_description(TEXT, "begins with one of the triggers"),
        "schema": with_description({"anyOf": [OBJECT, TRUTH]}, "what the JSON text must follow"),
        "end": with_description(TEXT, "what stands behind it"),
    },
    ["begin", "schema", "end"],
)
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _one_of_type("text", _FORMAT),
        *(_one_of_type(kind, _FORMAT, maybe=_SCHEMA) for kind in ("json_object", "json")),
        _one_of_type(
            "json_schema",
            _FORMAT,
            schema=with_description(SOME_OBJECT, "what the JSON text must follow"),
            maybe={"json_schema": with_description(NULL, "beside schema")},
        ),
        _one_of_type(
            "json_schema",
            _FORMAT,
            value=with_description(SOME_OBJECT, "the same in TGI's words; or an object with schema, and perhaps name"),
            maybe={"json_schema": with_description(NULL, "beside value")},
        ),
        _one_of_type(
            "json_schema", _FORMAT, json_schema=with_description(_JSON_SCHEMA, "what the JSON text must follow")
        ),
        _one_of_type("regex", _FORMAT, regex=_MATCHES),
        _one_of_type("regex", _FORMAT, pattern=_MATCHES),
        _one_of_type("regex", _FORMAT, value=_MATCHES),
        _one_of_type(
            "grammar", _FORMAT, grammar=with_description(SOME_TEXT, "GBNF, its rule `root` being the whole text")
        ),
        _one_of_type("structural_tag", _FORMAT, format=with_description(OBJECT, _TAG)),
        _one_of_type(
            "structural_tag",
            _FORMAT,
            structures=with_description(_list(_STRUCTURE), "the older form: what may stand behind a trigger"),
            triggers=with_description(_list(TEXT), "texts up to which the text is free"),
        ),
    ]
}

STRUCTURED: dict[str, Schema] = {
    "json": with_description({"anyOf": [OBJECT, SOME_TEXT]}, "a JSON schema, or its text"),
    "json_object": with_description(TRUTH, "true: the text is a JSON object"),
    "regex": with_description(SOME_TEXT, "the whole text matches"),
    "choice": with_description(_list(SOME_TEXT, MAX_CHOICES), "the text is one of these"),
    "grammar": with_description(SOME_TEXT, "GBNF, its rule `root` being the whole text"),
    "structural_tag": with_description({"anyOf": [OBJECT, SOME_TEXT]}, "text with constrained parts"),
}
STRUCTURED_UNSUPPORTED = (
    "backend", "disable_additional_properties", "disable_any_whitespace", "disable_fallback", "whitespace_pattern",
)  # fmt: skip
STRUCTURED_FIELDS = tuple(STRUCTURED)
_TGI_VALUE = "a JSON schema or its text; the regular expression; of json_schema an object with schema, and perhaps name"
TGI_GRAMMAR = request_object(
    {
        "type": with_description({"enum": ["json", "json_object", "json_schema", "regex"]}, "what value is"),
        "value": with_description({"anyOf": [OBJECT, SOME_TEXT]}, _TGI_VALUE),
    },
    ["type", "value"],
)
# Fields of a body that set one of these constraints: vLLM's older ones, SGLang's, llama.cpp's.
CONSTRAINT_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_NO_STRUCTURED = dict.fromkeys(STRUCTURED, with_description(NULL, "beside another")) | dict.fromkeys(
    STRUCTURED_UNSUPPORTED, _REFUSED
)
STRUCTURED_OUTPUTS: Schema = {
    "anyOf": [request_object(_NO_STRUCTURED | {name: schema}, [name]) for name, schema in STRUCTURED.items()]
}

STREAM_OPTIONS = request_object(
    {
        "include_usage": with_description(BOOLEAN, "a last chunk has the usage"),
        "continuous_usage_stats": with_description(BOOLEAN, "with include_usage: every chunk has the usage so far"),
        "include_obfuscation": {"const": False, "description": "nothing is padded; true is refused"},
    }
)
TEMPLATE_ARGUMENTS: Schema = {
    "type": "object",
    "additionalProperties": {
        "description": f"of a name that the template reads: true, false or text of {MAX_ARGUMENT_CHARS} characters"
    },
}
REASONING = request_object(
    {
        "effort": with_description({"enum": list(EFFORTS)}, "as reasoning_effort"),
        "enabled": with_description(TRUTH, "whether the model thinks"),
        "exclude": with_description(BOOLEAN, "true: as include_reasoning: false"),
    }
)
THINK: Schema = {"anyOf": [TRUTH, {"enum": list(THOUGHT_LEVELS)}]}
THINKING: Schema = {
    "anyOf": [
        TRUTH,
        request_object(
            {"type": with_description({"enum": list(THINKING_TYPES)}, "disabled: it does not; else it does")}
        ),
    ]
}
METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": ["string", "null"], "maxLength": MAX_LABEL_CHARS},
}
_BIAS: Schema = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_BIASED: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": INT32},
        {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARS},
    ]
}
LOGIT_BIAS: Schema = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {
            "type": "array",
            "items": {"type": "array", "prefixItems": [_BIASED, _BIAS], "minItems": 2, "maxItems": 2},
            "maxItems": MAX_LOGIT_BIAS,
        },
    ]
}


def list_schema(items: Schema) -> Schema:
    return {"type": "array", "items": items}
