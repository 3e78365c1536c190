"""vllm.grpc.engine.VllmEngine, which vLLM's routers speak.

Imports `api.common` and `protos`. A new RPC is a method of `vllm_rpcs` and of `vllm_protocol`.
"""
