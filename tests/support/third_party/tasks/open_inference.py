"""open-inference-openapi and open-inference-grpc: health, metadata and one inference each, of the same text."""

import sys

import grpc
from open_inference.grpc import protocol, service
from open_inference.openapi.client import InferenceRequest, OpenInferenceClient
from open_inference.openapi.types import RequestInput

SAID = "Hello, I am a model of one layer, and I say what I was told to say."
url, address = sys.argv[1:]
client = OpenInferenceClient(base_url=url)
client.check_server_liveness()
client.check_server_readiness()
client.check_model_readiness("parrot")
assert client.read_server_metadata().name == "motley"
assert "text_input" in [tensor.name for tensor in client.read_model_metadata("parrot").inputs]
given = RequestInput(name="text_input", shape=[1], datatype="BYTES", data=["Greet.<|hello-0|>"])
asked = InferenceRequest(id="1", inputs=[given], parameters={"max_tokens": 64, "temperature": 0})
outputs = {output.name: output.data for output in client.model_infer("parrot", request=asked).outputs}
assert outputs["text_output"].__root__ == [SAID], outputs

stub = service.GRPCInferenceServiceStub(grpc.insecure_channel(address))
assert stub.ServerReady(protocol.ServerReadyRequest()).ready
contents = protocol.InferTensorContents(bytes_contents=[b"Greet.<|hello-0|>"])
tensor = protocol.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=contents)
request = protocol.ModelInferRequest(model_name="parrot", inputs=[tensor])
request.parameters["max_tokens"].int64_param = 64
answer = stub.ModelInfer(request)
assert answer.outputs[0].contents.bytes_contents[0].decode() == SAID
print("done")
