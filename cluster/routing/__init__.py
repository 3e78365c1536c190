"""Sends each request to the best replica of all pools and on to another when that is lost.

Imports `transport` for the access log, and the root of `motley.cluster`; no API. Motley's own ranking of replicas is in
`prediction.latency_model`; another routing policy is a `ReplicaOrder` of `directory`, named by `RoutingConfig.order`.
"""
