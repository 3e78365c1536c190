"""grpc.health.v1, and health over HTTP.

Imports `routing` and `transport`; the control plane serves the same class. Another protocol's question whether the
service is well is answered here.
"""
