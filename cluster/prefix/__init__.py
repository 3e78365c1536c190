"""Benchmarks of the prefix store (`motley bench prefix`), nothing else, until they move to the distribution `motley-
bench`. Nothing but the CLI imports it. A new part of that benchmark is a module here and a row of `bench.PARTS`.
"""
