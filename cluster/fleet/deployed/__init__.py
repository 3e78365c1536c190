"""Keeps what has been deployed where the next command finds it: the fleet in the cluster, notes of services on this
machine, and what replicas share prefixes by. Imports `fleet.spec`, `prefix_store` and `security`. Another fact that
outlives the deploying process goes here.
"""
