"""Routing policies, which order the replicas for each request: Motley's own by predicted latency, and those of others.

Imports `routing.prediction` for what a policy is told. A new policy is a file here and a line in `routing_policies`;
fleet files then take its name, and `loadtests/motley_bench/routing/baseline_routers.py` may compare it.
"""
