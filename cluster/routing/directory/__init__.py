"""Knows which replicas there are, what they carry and where a request is best placed.

Imports `routing.policy`, `routing.prediction` and `routing.prefix_index`. A new fact about replicas that ranking needs
goes into `DirectoryEntry`.
"""
