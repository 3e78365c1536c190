"""Lets requests wait that no replica would take now: in turn among tenants, within bounds.

Imports `routing.directory` and `routing.prediction`. Another queueing discipline goes here.
"""
