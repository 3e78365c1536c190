"""Benchmarks of one engine: rates beside its peers, int8 KV, offloaded layers, and models divided among processes.

Another measurement of an engine, with a process of its own where it needs one, goes here.
"""
