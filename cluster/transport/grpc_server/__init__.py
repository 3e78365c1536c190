"""Serves gRPC: reads a request only when its caller is known, turns errors into status codes, registers the services
with Ray Serve. Imports `transport`, `security` and `protos`. A new service is registered in `servicers`.
"""
