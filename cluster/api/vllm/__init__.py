"""vllm.grpc.engine.VllmEngine, which vLLM's routers speak.

Imports `api.common`, `routing` and `transport`. A new RPC is a method of `vllm_rpcs` and of `vllm_protocol`.
"""
