"""Calls of the package kserve's clients, as its users write them. Arguments: a service's URL, and its gRPC address."""

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

URL, GRPC = sys.argv[1:]
MODEL = "tiny"


def asked(binary, outputs=None, **more):
    given = InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"abc"], dtype=object), binary_data=binary)
    parameters = {"max_tokens": 24, "seed": 5, "ignore_eos": True, **more}
    return InferRequest(model_name=MODEL, infer_inputs=[given], parameters=parameters, request_outputs=outputs)


def word(response):
    [found] = [output for output in response.outputs if output.name == "text_output"]
    text = found.as_numpy()[0]
    return text.decode() if isinstance(text, bytes) else text


async def main():
    rest, over_grpc = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceGRPCClient(GRPC)
    outputs = [RequestedOutput("text_output"), RequestedOutput("output_ids", {"binary_data": True})]
    texts = set()
    for binary in (True, False):
        for wanted in (None, outputs):
            for more in ({}, {"binary_data_output": True}):
                texts.add(word(await rest.infer(URL, asked(binary, wanted, **more), model_name=MODEL)))
                texts.add(word(await over_grpc.infer(asked(binary, wanted, **more))))
    assert len(texts) == 1, texts
    assert await rest.is_server_ready(URL)
    assert await rest.is_server_live(URL)
    assert await rest.is_model_ready(URL, MODEL)
    assert not await rest.is_model_ready(URL, "other")
    assert await over_grpc.is_server_ready()
    assert await over_grpc.is_model_ready(MODEL)
    await rest.close()
    await over_grpc.close()


asyncio.run(main())
print("done")
