"""Tells a collector of OpenTelemetry of each request: spans of its way, and `gen_ai.server` metrics, over OTLP.

Imports `routing`. What else is told of requests over OTLP goes here.
"""
