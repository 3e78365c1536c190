"""Structured output: what a client may ask a text to follow, checked here and enforced token by token.

What a client may ask for is a line of grammar_spec; spec and check of structural tags lie here; schema/ and regex/
translate, process/ compiles and matches in processes of their own.
"""
