"""Sends each request to the best replica of all pools and on to another when that is lost.

Imports `transport` for the access log, and the root of `motley.cluster`; no API. A new routing policy goes beside
`router`; what ranks replicas goes into `directory` and `prediction`.
"""
