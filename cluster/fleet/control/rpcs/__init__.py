"""Serves the control plane over gRPC: motley.v1.ControlPlane, KEDA's external scaler, health and reflection, for
admins' keys. Imports the other folders of `control`, `security`, `transport`, `api` and `routing`. A new RPC is a
method of `control_rpcs` and its messages' conversion in `control_messages`, after the proto has it.
"""
