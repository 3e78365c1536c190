"""Pointwise operators: norms, rotary embedding, activation, writes to the KV cache, and sums of split-K parts.

They read, compute a little and write. Imports `launch`, `device` and `attention.kv_cache`; the next operator gets a
kernel file and a file for its operation beside it.
"""
