"""Sends each request to the best replica of all pools and on to another when that is lost.

Imports `transport` for the access log, and the root of `motley.cluster`; no API. Which replica is best is decided by a
routing policy of `policy`, by default Motley's own over what `prediction` predicts.
"""
