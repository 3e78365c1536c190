"""KServe's Open Inference Protocol, with Triton's extensions, over gRPC and HTTP.

Imports `api.common`, `routing` and `transport`. A new input or parameter goes into `kserve_request`, a new output
tensor into `kserve_response`.
"""
