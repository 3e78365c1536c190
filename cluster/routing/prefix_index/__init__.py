"""Estimates which replicas and prefix stores hold the beginning of a prompt.

Pure: no Ray, no I/O. Another index of cached prefixes goes here.
"""
