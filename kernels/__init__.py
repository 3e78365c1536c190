"""Operators that a model is made of: each takes tensors and returns tensors.

`contract` is all that replicas rely on, `ops` chooses the operators of a device, and `registry` lists every operator
that has kernels of its own. Nothing here imports `replicas` or `cluster`.
"""
