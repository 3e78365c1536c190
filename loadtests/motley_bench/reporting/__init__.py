"""Parts of a report: its table, small charts for a terminal, and a histogram of many durations.

Imports nothing of this package. What several benchmarks show in the same way goes here.
"""
