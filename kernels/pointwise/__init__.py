"""Operators that read, compute a little and write: norms, rotary embedding, activation, the write into the KV cache,
sums of split-K parts. Imports `launch`, `device` and `attention.kv_cache`; the next one gets a kernel file and its
operation beside it.
"""
