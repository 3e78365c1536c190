"""httpx-sse and aiohttp: a stream as server-sent events, and one that is left in the middle."""

import asyncio
import json
import sys

import aiohttp
import httpx
from httpx_sse import connect_sse

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
URL = f"{sys.argv[1]}/v1/chat/completions"
BODY = {"model": "parrot", "stream": True, "messages": [{"role": "user", "content": "script:hello"}]}
with httpx.Client() as client, connect_sse(client, "POST", URL, json=BODY) as source:
    *events, last = [event.data for event in source.iter_sse()]
assert last == "[DONE]"
assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events) == SAID


async def leave():
    async with aiohttp.ClientSession() as session:
        async with session.post(URL, json=BODY) as response:
            assert response.content_type == "text/event-stream"
            first = await response.content.readline()
            assert first.startswith(b"data: {")
        async with session.post(URL, json={**BODY, "stream": False}) as response:
            return (await response.json())["choices"][0]["message"]["content"]


assert asyncio.run(leave()) == SAID
print("done")
