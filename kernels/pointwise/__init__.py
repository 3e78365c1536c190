"""Operators that read, compute a little and write: norms, rotary embedding, activation, the write into the cache."""
