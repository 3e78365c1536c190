"""grpcio-health-checking, and calls made with nothing but what reflection tells. Argument: the address."""

import sys

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

channel = grpc.insecure_channel(sys.argv[1])
health = health_pb2_grpc.HealthStub(channel)
SERVING = health_pb2.HealthCheckResponse.SERVING
assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING

# What reflection tells is enough to call.
database = ProtoReflectionDescriptorDatabase(channel)
pool = descriptor_pool.DescriptorPool(database)
ours = ["grpc.health.v1.Health", "inference.GRPCInferenceService", "motley.v1.Inference", "vllm.grpc.engine.VllmEngine"]
assert set(ours) <= set(database.get_services()), database.get_services()
for service in ours:
    assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING, service
    for method in pool.FindServiceByName(service).methods:
        assert method.input_type.full_name
        assert method.output_type.full_name


def call(service, name, **fields):
    method = pool.FindServiceByName(service).FindMethodByName(name)
    request = message_factory.GetMessageClass(method.input_type)(**fields)
    answer = message_factory.GetMessageClass(method.output_type)
    invoke = channel.unary_unary(
        f"/{service}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    return invoke(request, timeout=60)


whole = call("motley.v1.Inference", "Complete", text="abc", sampling={"max_tokens": 8, "temperature": 0})
assert whole.usage.completion_tokens <= 8
assert whole.started.model == "tiny"
text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"abc"]}}
parameters = {"max_tokens": {"int64_param": 8}, "temperature": {"double_param": 0.0}}
answer = call("inference.GRPCInferenceService", "ModelInfer", inputs=[text], parameters=parameters)
assert answer.outputs[0].contents.bytes_contents[0].decode() == whole.choices[0].text
assert call("vllm.grpc.engine.VllmEngine", "HealthCheck").healthy
print("done")
