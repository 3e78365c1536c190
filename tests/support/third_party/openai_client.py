"""Calls of the published `openai` client, blocking and async, as its users write them. Argument: the HTTP address."""

import asyncio
import base64
import json
import math
import struct
import sys
import time
import urllib.request

import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
ENDLESS = {**GREEDY, "max_tokens": 60_000, "stream": True}


def refused(kind, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except kind as error:
        return error
    raise SystemExit(f"{kind.__name__} was expected")


def wait_until_running(count):
    """While this process lives and keeps its connections: that it ends must not be what frees the engine."""
    deadline = time.monotonic() + 10
    while (load := json.load(urllib.request.urlopen(f"{url}/health", timeout=10))["load"])["running"] != count:
        assert time.monotonic() < deadline, load
        time.sleep(0.02)


# Models
assert [model.id for model in client.models.list()] == ["tiny"]
assert client.models.retrieve("tiny").object == "model"

# Completions, whole and streamed, with usage
whole = client.completions.create(prompt="abc", max_tokens=24, **GREEDY)
answer = whole.choices[0].text
assert whole.choices[0].finish_reason == "length"
assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 24, 27)
options = {"include_usage": True}
chunks = list(client.completions.create(prompt="abc", max_tokens=24, stream=True, stream_options=options, **GREEDY))
assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer
assert chunks[-1].usage == whole.usage
assert not chunks[-1].choices

# Several prompts and choices, echo
several = client.completions.create(prompt=["xyz", "abc"], max_tokens=24, **GREEDY)
assert [choice.index for choice in several.choices] == [0, 1]
ids = client.completions.create(prompt=[64, 65, 66], max_tokens=24, **GREEDY)
assert several.choices[1].text == ids.choices[0].text == answer
assert client.completions.create(prompt="abc", max_tokens=24, echo=True, **GREEDY).choices[0].text == "abc" + answer
chosen = client.completions.create(model="tiny", prompt="abc", max_tokens=16, n=3, seed=1)
assert len({choice.text for choice in chosen.choices}) == 3
assert chosen.usage.completion_tokens <= 3 * 16

# Stop strings are no part of the text
stop = next(char for char in answer[4:] if char.isascii() and char not in answer[:2])
stopped = client.completions.create(prompt="abc", max_tokens=24, stop=[stop], **GREEDY).choices[0]
assert (stopped.finish_reason, stopped.text) == ("stop", answer[: answer.index(stop)])

# Logprobs
logprobs = client.completions.create(prompt="abc", max_tokens=4, logprobs=2, **GREEDY).choices[0].logprobs
assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
assert all(max(top.values()) == own for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))

# Chat, whole and streamed, with logprobs
chat = {"messages": HELLO, "max_completion_tokens": 16, "logprobs": True, "top_logprobs": 3, **GREEDY}
said = client.chat.completions.create(**chat)
message, entries = said.choices[0].message, said.choices[0].logprobs.content
assert (message.role, said.choices[0].finish_reason, len(entries)) == ("assistant", "length", 16)
assert said.usage.completion_tokens == 16
assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries), "greedy takes the best"
assert all(len(entry.top_logprobs) == 3 and math.exp(entry.logprob) <= 1.0 for entry in entries)
assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == message.content
chunks = list(client.chat.completions.create(stream=True, **chat))
assert chunks[0].choices[0].delta.role == "assistant"
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
assert chunks[-1].choices[0].finish_reason == "length"
with client.chat.completions.stream(messages=HELLO, max_completion_tokens=16, **GREEDY) as stream:
    stream.until_done()
    assert stream.current_completion_snapshot.choices[0].message.content == message.content

# Embeddings: numbers and, as the client asks for by itself, base64
[one, two] = client.embeddings.create(model="tiny", input=["abc", "xyz"]).data
assert abs(sum(value * value for value in one.embedding) - 1) < 1e-4
assert one.embedding != two.embedding
coded = client.embeddings.create(model="tiny", input="abc", encoding_format="base64")
data = base64.b64decode(coded.data[0].embedding)
# Beside another text the last digits may differ.
assert all(abs(a - b) < 1e-4 for a, b in zip(struct.unpack(f"<{len(data) // 4}f", data), one.embedding, strict=True))
assert coded.usage.prompt_tokens == 3

# Errors are the client's own exceptions, with the field and the code
error = refused(openai.BadRequestError, client.completions.create, model="tiny", prompt="abc", n=0)
assert (error.status_code, error.param, error.code, error.type) == (400, "n", "invalid_value", "invalid_request_error")
error = refused(openai.NotFoundError, client.chat.completions.create, model="other", messages=HELLO)
assert (error.param, error.code) == ("model", "model_not_found")
error = refused(openai.BadRequestError, client.completions.create, model="tiny", prompt="x" * 65_536, stream=True)
assert error.code == "context_length_exceeded", "refused before the stream begins"
error = refused(openai.NotFoundError, client.responses.create, model="tiny", input="Hello")
assert error.code == "unsupported_endpoint"
assert "/v1/chat/completions" in error.message

# A stream that is closed ends at the engine, and the client goes on
with client.completions.create(prompt="abc", **ENDLESS) as stream:
    assert next(stream).choices
    wait_until_running(1)
wait_until_running(0)
assert client.completions.create(prompt="abc", max_tokens=24, **GREEDY).choices[0].text == answer


async def concurrently():
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def complete():
            return (await client.completions.create(prompt="abc", max_tokens=24, **GREEDY)).choices[0].text

        async def stream():
            chunks = await client.completions.create(prompt="abc", max_tokens=24, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def read_on(begun):
            async for _ in await client.completions.create(prompt="abc", **ENDLESS):
                begun.set()

        assert await asyncio.gather(complete(), stream(), complete(), stream()) == [answer] * 4
        begun = asyncio.Event()
        reader = asyncio.create_task(read_on(begun))
        await begun.wait()
        await asyncio.to_thread(wait_until_running, 1)
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()
        await asyncio.to_thread(wait_until_running, 0)
        assert await complete() == answer


asyncio.run(concurrently())
print("done")
