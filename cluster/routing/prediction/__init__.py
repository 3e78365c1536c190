"""Predicts time to first token and time per token on each replica, as arithmetic on columns.

Pure: no Ray, no clock, no I/O. A new term of the prediction goes into `latency_model`.
"""
