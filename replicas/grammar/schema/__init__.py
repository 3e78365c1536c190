"""JSON Schemas: which keywords can be kept to, and the same schema in the grammar library's words.

May import grammar.regex. A keyword of JSON Schema begins in keywords.py.
"""
