"""Decisions made before a divided model is loaded: the layers of each stage, the memory and the speed expected of each
process, and that all load the same checkpoint. May import parallel.transport, capacity, loading, kv, execution,
model and checkpoint; starts no process. A new rule for dividing a model among devices goes here.
"""
