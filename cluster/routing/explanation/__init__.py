"""Explains where an ingress's latest requests went and why: records while they run, text when somebody asks.

Imports `routing.directory` and `routing.prediction`. A further term of latency goes into `latency_terms`, with its
sentence in `route_words`.
"""
