"""KServe's protocol over HTTP: JSON bodies, binary tensor data, generate, refused endpoints, descriptions for OpenAPI.

Imports `api.kserve`, `api.common` and `transport`. A new HTTP extension of Triton's goes here.
"""
