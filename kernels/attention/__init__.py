"""Paged attention on GPUs: the KV cache that its kernels read, decode with split KV, and chunked prefill.

Imports `launch` and `device`; a further attention kernel gets a file here and a line in `attention_operations`.
Which kernel a compute capability gets is decided in `device/precision`.
"""
