"""Operators that a model is made of: tensors in, tensors out.

`contract` is all that replicas rely on, `ops` chooses the operators of a device, `registry` lists every operator that
has kernels of its own; imports nothing of replicas or cluster.
"""
