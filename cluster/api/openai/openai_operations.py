"""OpenAI's routes, and the routes beside them, for the description of the interface."""

from __future__ import annotations

from ....replicas.errors import NotFound, Unavailable
from ...transport.http_server.openapi import HttpOperation, Operations
from ..common.fields.body_shapes import open_schema
from . import openai_response_schemas as answers
from .openai_request_schemas import BODY_SCHEMAS

_BODY = {route: open_schema(schema, route) for route, schema in BODY_SCHEMAS.items()}

OPERATIONS: Operations = {
    ("POST", "/v1/completions"): HttpOperation(
        "Continue a text",
        answers.COMPLETION,
        _BODY["completion"],
        answers.COMPLETION_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/chat/completions"): HttpOperation(
        "Answer a conversation",
        answers.CHAT,
        _BODY["chat"],
        answers.CHAT_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/embeddings"): HttpOperation(
        "Turn texts into vectors of unit length", answers.EMBEDDINGS, _BODY["embedding"], engine=True, more=(NotFound,)
    ),
    ("GET", "/v1/models"): HttpOperation("The models served", answers.MODELS),
    ("GET", "/v1/models/{name:path}"): HttpOperation("One model", answers.MODEL, more=(NotFound,)),
    ("POST", "/tokenize"): HttpOperation(
        "Token ids of a text, or of a conversation in the model's template",
        answers.TOKENIZED,
        _BODY["tokenize"],
        more=(NotFound,),
    ),
    ("POST", "/detokenize"): HttpOperation(
        "The text of token ids", answers.DETOKENIZED, _BODY["detokenize"], more=(NotFound,)
    ),
    ("GET", "/tokenizer_info"): HttpOperation(
        "Named tokens and chat template, for programs that have no tokenizer", answers.TOKENIZER_INFO
    ),
    ("GET", "/version"): HttpOperation("The service's version, as vLLM has it", answers.VERSION),
    ("GET", "/health"): HttpOperation(
        "Whether requests are served, or held for a replica that is still to come, and what the healthy ones carry",
        answers.HEALTH,
        more=(Unavailable,),
    ),
    ("GET", "/ping"): HttpOperation("The same, where SageMaker asks for it", answers.HEALTH, more=(Unavailable,)),
}
