"""Processes of a benchmark: children with which a parent exchanges lines of JSON, and parts within one time limit.

Imports nothing of this package, and of Motley only errors: children start fast.
"""
