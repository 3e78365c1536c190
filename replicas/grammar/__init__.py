"""Structured output: what a client may ask a text to follow, checked here and enforced token by token.

spec and check of structural tags lie here; schema/ and regex/ translate, process/ compiles and matches in processes
of their own.
"""
