"""OpenAI's routes, and the routes beside them, for the description of the interface."""

from __future__ import annotations

from ....replicas.errors import NotFound, Unavailable
from ...transport.http_server.openapi import HttpOperation, Operations
from ..common.fields.body_shapes import open_schema
from . import openai_response_schemas as schemas
from .openai_request_schemas import BODY_SCHEMAS

_BODY = {route: open_schema(schema, route) for route, schema in BODY_SCHEMAS.items()}

OPERATIONS: Operations = {
    ("POST", "/v1/completions"): HttpOperation(
        "Continue a text",
        schemas.COMPLETION,
        _BODY["completion"],
        schemas.COMPLETION_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/chat/completions"): HttpOperation(
        "Answer a conversation",
        schemas.CHAT,
        _BODY["chat"],
        schemas.CHAT_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/embeddings"): HttpOperation(
        "Turn texts into vectors of unit length", schemas.EMBEDDINGS, _BODY["embedding"], engine=True, more=(NotFound,)
    ),
    ("GET", "/v1/models"): HttpOperation("The models served", schemas.MODELS),
    ("GET", "/v1/models/{name:path}"): HttpOperation("One model", schemas.MODEL, more=(NotFound,)),
    ("POST", "/tokenize"): HttpOperation(
        "Token ids of a text, or of a conversation in the model's template",
        schemas.TOKENIZED,
        _BODY["tokenize"],
        more=(NotFound,),
    ),
    ("POST", "/detokenize"): HttpOperation(
        "The text of token ids", schemas.DETOKENIZED, _BODY["detokenize"], more=(NotFound,)
    ),
    ("GET", "/tokenizer_info"): HttpOperation(
        "Named tokens and chat template, for programs that have no tokenizer", schemas.TOKENIZER_INFO
    ),
    ("GET", "/version"): HttpOperation("The service's version, as vLLM has it", schemas.VERSION),
    ("GET", "/health"): HttpOperation(
        "Whether requests are served, or held for a replica that is still to come, and what the healthy ones carry",
        schemas.HEALTH,
        more=(Unavailable,),
    ),
    ("GET", "/ping"): HttpOperation("The same, where SageMaker asks for it", schemas.HEALTH, more=(Unavailable,)),
}
