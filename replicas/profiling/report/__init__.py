"""A profile as text, JSON and HTML.

May import profiling. A new output format goes here.
"""
