"""Checkpoint formats: one class in one file for each, from tensors on disk to a weight that kernels take, and the GPTQ
writer. May import kernels and checkpoint. A new format is a new file and one line in registry.py.
"""
