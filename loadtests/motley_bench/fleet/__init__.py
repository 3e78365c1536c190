"""Benchmark of a live fleet: Motley's routing beside power of two choices, under one load in turns."""
