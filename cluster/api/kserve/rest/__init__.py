"""KServe's protocol over HTTP: JSON bodies, binary tensor data, generate, refused endpoints, descriptions for OpenAPI.

Imports `api.kserve`. A new HTTP extension of Triton's goes here.
"""
