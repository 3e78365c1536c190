"""OpenAI's routes, and the routes beside them, for the description of the interface."""

from __future__ import annotations

from ...replicas.errors import NotFound, Unavailable
from ..web.openapi import Operation, Operations
from . import openai_answers as answers
from .body_shapes import opened
from .openai_bodies import BODIES

_BODY = {route: opened(schema, route) for route, schema in BODIES.items()}

OPERATIONS: Operations = {
    ("POST", "/v1/completions"): Operation(
        "Continue a text",
        answers.COMPLETION,
        _BODY["completion"],
        answers.COMPLETION_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        answers.CHAT,
        _BODY["chat"],
        answers.CHAT_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Turn texts into vectors of unit length", answers.EMBEDDINGS, _BODY["embedding"], engine=True, more=(NotFound,)
    ),
    ("GET", "/v1/models"): Operation("The models served", answers.MODELS),
    ("GET", "/v1/models/{name:path}"): Operation("One model", answers.MODEL, more=(NotFound,)),
    ("POST", "/tokenize"): Operation(
        "Token ids of a text, or of a conversation in the model's template",
        answers.TOKENIZED,
        _BODY["tokenize"],
        more=(NotFound,),
    ),
    ("POST", "/detokenize"): Operation(
        "The text of token ids", answers.DETOKENIZED, _BODY["detokenize"], more=(NotFound,)
    ),
    ("GET", "/tokenizer_info"): Operation(
        "Named tokens and chat template, for programs that have no tokenizer", answers.TOKENIZER_INFO
    ),
    ("GET", "/version"): Operation("The service's version, as vLLM has it", answers.VERSION),
    ("GET", "/health"): Operation(
        "Whether requests are served, or held for a replica that is still to come, and what the healthy ones carry",
        answers.HEALTH,
        more=(Unavailable,),
    ),
    ("GET", "/ping"): Operation("The same, where SageMaker asks for it", answers.HEALTH, more=(Unavailable,)),
}
