"""Calls of tritonclient, as its users write them. Arguments: a service's address, and its URL."""

import json
import queue
import sys
import time
import urllib.request

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
HTTP = sys.argv[2]
MODEL = "tiny"


def wait_until_running(count):
    """While this process lives: that it ends must not be what frees the engine."""
    deadline = time.monotonic() + 10
    while (load := json.load(urllib.request.urlopen(f"{HTTP}/health", timeout=10))["load"])["running"] != count:
        assert time.monotonic() < deadline, load
        time.sleep(0.02)


def text(prompt, streaming=False):
    prompt_input = triton.InferInput("text_input", [1], "BYTES")
    prompt_input.set_data_from_numpy(np.array([prompt.encode()], dtype=object))
    flag = triton.InferInput("streaming", [1], "BOOL")
    flag.set_data_from_numpy(np.array([streaming]))
    return [prompt_input, flag]


def ids(values, dtype):
    given = triton.InferInput("input_ids", [len(values)], "INT32" if dtype is np.int32 else "INT64")
    given.set_data_from_numpy(np.array(values, dtype=dtype))
    return [given]


def refused(call, *arguments, **more):
    try:
        call(*arguments, **more)
    except InferenceServerException as error:
        return error
    raise SystemExit(f"{call} was not refused")


GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}

# Health and metadata
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready(MODEL)
assert not client.is_model_ready("other")
assert client.get_server_metadata().name == "motley"
metadata = client.get_model_metadata(MODEL, as_json=True)
assert {"text_input", "input_ids", "streaming"} <= {tensor["name"] for tensor in metadata["inputs"]}
assert client.get_model_config(MODEL).config.model_transaction_policy.decoupled
assert [model.name for model in client.get_model_repository_index().models] == [MODEL]
assert refused(client.get_model_metadata, "other").status() == "StatusCode.NOT_FOUND"

# Infer: text, ids of both widths, requested outputs, logprobs
whole = client.infer(MODEL, text("abc"), request_id="mine", parameters=GREEDY)
answer = whole.as_numpy("text_output")[0].decode()
assert whole.get_response().id == "mine"
assert whole.as_numpy("finish_reason")[0] == b"length"
outputs = [triton.InferRequestedOutput(name) for name in ("output_ids", "text_output", "logprobs")]
for dtype in (np.int32, np.int64):
    result = client.infer(MODEL, ids([64, 65, 66], dtype), outputs=outputs, parameters={**GREEDY, "logprobs": 0})
    assert result.as_numpy("text_output")[0].decode() == answer, (result.as_numpy("text_output"), answer)
    assert result.as_numpy("output_ids").shape == result.as_numpy("logprobs").shape == (24,)
    assert result.as_numpy("logprobs").dtype == np.float32
    assert (result.as_numpy("logprobs") <= 0).all()
    assert result.as_numpy("finish_reason") is None
# Triton's own arguments
client.infer(MODEL, text("abc"), parameters=GREEDY, priority=1, timeout=60_000_000)
error = refused(client.infer, MODEL, text("abc"), parameters={**GREEDY, "temperature": -1.0})
assert error.message().startswith("parameters.temperature: "), error

# Streams: several requests at once on one, with an error among them
answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
for name in ("a", "b"):
    client.async_stream_infer(
        MODEL, text("abc", True), request_id=name, enable_empty_final_response=True, parameters=GREEDY
    )
client.async_stream_infer(MODEL, text("abc", True), request_id="bad", parameters={"top_p": 7.0})
texts, ended, failed = {"a": "", "b": ""}, set(), None
while len(ended) < 2 or failed is None:
    result, error = answers.get(timeout=60)
    if error is not None:
        failed = error.message()
        continue
    response = result.get_response()
    if response.parameters["triton_final_response"].bool_param:
        assert not response.outputs
        ended.add(response.id)
    else:
        texts[response.id] += result.as_numpy("text_output")[0].decode()
assert texts == {"a": answer, "b": answer}, (texts, answer)
assert failed.startswith("[request id: bad] parameters.top_p: "), failed
client.stop_stream()

# Cancel
client.start_stream(callback=lambda result, error: answers.put((result, error)))
client.async_stream_infer(MODEL, text("abc", True), parameters={"max_tokens": 60_000, "ignore_eos": True})
result, error = answers.get(timeout=60)
assert error is None, error
wait_until_running(1)
client.stop_stream(cancel_requests=True)
wait_until_running(0)
print("done")
