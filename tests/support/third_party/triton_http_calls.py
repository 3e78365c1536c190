"""Each method of tritonclient over HTTP, as its users write them. Argument: a service's host and port."""

import asyncio
import json
import sys
import urllib.request

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "tiny"
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
client = triton.InferenceServerClient(sys.argv[1])


def text(prompt, binary):
    given = triton.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([prompt.encode()], dtype=object), binary_data=binary)
    return [given]


def ids(values, dtype, binary):
    given = triton.InferInput("input_ids", [1, len(values)], "INT32" if dtype is np.int32 else "INT64")
    given.set_data_from_numpy(np.array([values], dtype=dtype), binary_data=binary)
    return [given]


def refused(name, *arguments, **more):
    try:
        getattr(client, name)(*arguments, **more)
    except InferenceServerException as error:
        return f"{error.status()} {error.message()}"
    raise SystemExit(f"{name} was not refused")


def word(result, name="text_output"):
    found = result.as_numpy(name)[0]
    return found.decode() if isinstance(found, bytes) else found


# Infer: JSON and binary each way, text and ids, named outputs and all
answer = word(client.infer(MODEL, text("abc", True), parameters=GREEDY))
for binary in (True, False):
    for given in (text("abc", binary), ids([64, 65, 66], np.int32, binary), ids([64, 65, 66], np.int64, binary)):
        for back in (True, False):
            outputs = [
                triton.InferRequestedOutput("text_output", binary_data=back),
                triton.InferRequestedOutput("output_ids"),
                triton.InferRequestedOutput("logprobs", binary_data=back),
            ]
            result = client.infer(MODEL, given, outputs=outputs, parameters={**GREEDY, "logprobs": 0})
            assert word(result) == answer, (word(result), answer)
            assert result.as_numpy("output_ids").shape == result.as_numpy("logprobs").shape == (24,)
        whole = client.infer(MODEL, given, request_id="mine", model_version="1", priority=1, parameters=GREEDY)
        assert (word(whole), whole.get_response()["id"]) == (answer, "mine")
result = client.async_infer(MODEL, text("abc", True), timeout=60_000_000, parameters=GREEDY).get_result()
assert word(result) == answer
client.infer(MODEL, text("abc", True), response_compression_algorithm="gzip", parameters=GREEDY)


async def by_asyncio():
    async with triton_aio.InferenceServerClient(sys.argv[1]) as other:
        for binary in (True, False):
            assert word(await other.infer(MODEL, text("abc", binary), parameters=GREEDY)) == answer
        assert await other.is_server_ready()
        assert [model["name"] for model in await other.get_model_repository_index()] == [MODEL]
        assert (await other.get_inference_statistics(MODEL))["model_stats"][0]["name"] == MODEL


asyncio.run(by_asyncio())

# What there is besides
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready(MODEL, "1")
assert not client.is_model_ready("other")
assert {"binary_tensor_data", "generate", "statistics"} <= set(client.get_server_metadata()["extensions"])
assert client.get_model_metadata(MODEL, "1")["versions"] == ["1"]
assert client.get_model_config(MODEL)["backend"] == "motley"
assert client.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
for asked in ((), (MODEL,), (MODEL, "1")):
    [counted] = client.get_inference_statistics(*asked)["model_stats"]
    assert counted["inference_stats"]["success"]["ns"] > 0 < counted["inference_count"]

# What there is not says so
assert "'other' is not served here" in refused("get_inference_statistics", "other")
for name, arguments in {
    "load_model": (MODEL,), "unload_model": (MODEL,), "get_trace_settings": (), "update_trace_settings": (MODEL,),
    "get_log_settings": (), "update_log_settings": ({},), "get_system_shared_memory_status": (),
    "register_system_shared_memory": ("r", "/k", 8), "unregister_system_shared_memory": (),
    "get_cuda_shared_memory_status": ("r",), "register_cuda_shared_memory": ("r", b"aa", 0, 8),
    "unregister_cuda_shared_memory": ("r",),
}.items():  # fmt: skip
    assert " supported; " in refused(name, *arguments), name
shared = triton.InferInput("text_input", [1], "BYTES")
shared.set_shared_memory("r", 8)
assert "shared_memory_region is not supported; send" in refused("infer", MODEL, [shared])
counts = [triton.InferRequestedOutput("text_output", class_count=2)]
assert "classification is not supported" in refused("infer", MODEL, text("a", True), outputs=counts)
assert "must not be encoded" in refused("infer", MODEL, text("a", True), request_compression_algorithm="gzip")
assert "parameters.sequence_id" in refused("infer", MODEL, text("a", True), sequence_id=3)
assert "parameters.temperature: " in refused("infer", MODEL, text("a", True), parameters={"temperature": -1.0})

# The generate extension, as its documentation calls it by curl
asked = {"text_input": "abc", "parameters": GREEDY}
url = f"http://{sys.argv[1]}/v2/models/{MODEL}/generate"
assert json.load(urllib.request.urlopen(url, json.dumps(asked).encode()))["text_output"] == answer
with urllib.request.urlopen(f"{url}_stream", json.dumps(asked).encode()) as stream:
    events = [json.loads(line.removeprefix(b"data: ")) for line in stream if line.strip()]
assert "".join(event["text_output"] for event in events) == answer
assert len(events) > 1
print("done")
