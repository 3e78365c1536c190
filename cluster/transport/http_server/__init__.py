"""Serves HTTP: the FastAPI application, its guard, JSON and event-stream responses, CORS, and the OpenAPI document's
parts. Imports `transport` and `security`; no protocol. A new middleware or form of response goes here, a new route
into `motley.cluster.api`.
"""
