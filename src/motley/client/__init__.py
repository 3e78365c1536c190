"""Client of motley.v1 over gRPC, blocking (`Client`) or asynchronous (`AsyncClient`).

    with Client("127.0.0.1:9000") as client:
        with client.stream("The with statement", temperature=0, max_tokens=64) as chunks:
            for chunk in chunks:
                print(chunk.choices[0].text if chunk.choices else "", end="")

Chats take messages, tools and tool_choice in OpenAI's shape; `reply` turns an answer into the message to send back.

Calls are retried if that is safe, and streams survive the loss of a replica or of the ingress: the first message
carries the seed, every message the token ids, and a stream that breaks is requested again from where it was. So is
one that is silent for `silence_s` while the service answers nothing at all: a service that is stopped breaks no stream.

Errors are the service's own: `InvalidRequest`, `Overloaded`, … of `motley.replicas.errors`, with the field at
fault in `param`; `__cause__` is gRPC's error. What cannot even be sent, such as a text for a number, raises
`InvalidRequest` at once.
"""

from .aio import AsyncClient, AsyncCompletionStream
from .blocking import Client, CompletionStream
from .channel import Tls
from .generate_requests import Sampling, chat_request, complete_request
from .resume import Resume
from .tools import reply

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "Client",
    "CompletionStream",
    "Resume",
    "Sampling",
    "Tls",
    "chat_request",
    "complete_request",
    "reply",
]
