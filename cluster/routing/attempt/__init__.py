"""Holds one attempt of a request: where it may go, whether its replica lives, whether there is another attempt, and
how it is cancelled. Imports `routing.directory`. A new reason to retry goes into `retry_decider`.
"""
