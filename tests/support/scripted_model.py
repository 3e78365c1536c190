"""A whole ingress before a model that writes what it is told to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import openapi_conformance
from local_ingress import make_ingress
from long_worker import LongWorker
from tool_templates import write_tool_tokenizer

from motley.replicas.types import Delta, FinishReason, StreamMessage, TokenLogprob


class Scripted:
    """`template`: one of TEMPLATES."""

    def __init__(self, folder: Path, template: str) -> None:
        self._folder = write_tool_tokenizer(folder, template)

    async def __call__(
        self,
        text: str,
        reason: FinishReason = FinishReason.STOP,
        *,
        step: int = 1,
        logprobs: bool = False,
        stop_reason: int | None = None,
    ) -> Any:
        """`step`: tokens that come at once; a token is a byte here, or a mark."""
        self.worker = LongWorker(str(self._folder), [])  # its messages need the ingress's tokenizer
        self.ingress = await make_ingress(self._folder, self.worker)
        self.tokenizer = self.ingress.admitter.tokenizer
        self.ids = self.tokenizer.encode(text)
        stream, messages = self.tokenizer.detokenizer(), [StreamMessage(cached_tokens=0, weights=0, contents="aa")]
        for at in range(0, len(self.ids), step):
            ids = tuple(self.ids[at : at + step])
            entries = tuple(TokenLogprob(i, -1.0, ((i, -1.0),)) for i in ids) if logprobs else None
            messages.append(StreamMessage((Delta(0, ids, stream.push(ids), entries),)))
        messages.append(
            StreamMessage((Delta(0, (258,), stream.flush(), () if logprobs else None, reason, stop_reason),))
        )
        self.worker._messages = messages
        self.call = openapi_conformance.caller(self.ingress.__serve_build_asgi_app__())
        return partial(self.call, "POST")
