"""Tensor-parallel ranks and pipeline stages: which part of a model each process holds, and how the processes compute a
step together.
"""
