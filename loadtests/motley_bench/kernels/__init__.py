"""Benchmark of the operators one by one, on a CPU and on a GPU, beside those of torch.

A problem that an operator is measured on goes here; the operators and their references are in motley.kernels.
"""
