"""Offline tools for all operators: config search, tuned tables and their checks, the compile matrix, and timing.

Configs are found by measurement, or predicted from compiled resources. Imports everything below (`compiler`, the
registry, `launch`, `device`); code that serves requests imports it only to measure. Another way to find or check a
config goes here.
"""
