"""motley.v1.Inference, our own gRPC service.

Imports `api.common`, `routing` and `transport`. A new RPC is a method of `motley_rpcs` and of `motley_protocol`, after
the proto has it.
"""
