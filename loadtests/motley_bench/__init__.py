"""Benchmarks of Motley: `motley bench …`, a distribution of its own (motley-bench), beside the product and never in it.

May import all of Motley; nothing of Motley imports it. Each folder is one idea: a new benchmark is a module in the
folder of what it measures, with a `run` that returns a report, and a command in `commands`.
"""
