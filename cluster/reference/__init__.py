"""Generator of docs/api.md from the protos, the OpenAPI document and the sources: `make reference`."""
