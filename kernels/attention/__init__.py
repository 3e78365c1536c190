"""Attention over the paged cache: decode in splits, prefill in chunks."""
