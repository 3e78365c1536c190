"""Tells which GPUs to rent for a trace: reads traces, searches mixes by simulation, writes the report.

Imports `simulation`, `routing.prediction` and `fleet.scaling`; the CLI imports it. Another format of traces is a row of
`request_trace`.
"""
