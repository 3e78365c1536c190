"""Brings the fleet to the state that was decided, step by step, and asks the scaling policy.

Imports `control.state`, `control.backend`, `fleet.spec`, `fleet.scaling` and `routing`; neither Ray nor gRPC. Another
thing that a step looks after goes here.
"""
