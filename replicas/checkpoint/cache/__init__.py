"""Weights as kernels want them, kept from start to start: the cache's folder, its file format, and how a start finds
and prefetches its entry. May import checkpoint.reading. What else is kept beside the weights goes here.
"""
