"""Metrics of the whole service: what each process counts, gathered so that no count falls when a process ends.

Imports `routing`, `transport` and `ray_compat`. A new metric is a field with metadata, of a class that `metrics_table`
reads; a new way to read the metrics is a file here.
"""
