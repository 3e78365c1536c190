"""Paged attention on GPUs: the KV cache as kernels see it, decode in splits, prefill in chunks.

Imports `launch` and `device`; a further attention kernel gets a file here and a line in `attention_operations`.
"""
