"""Benchmark of prefixes that are shared through a Redis. A new part is a module here and a row of
`prefix_benchmark.PARTS`.
"""
