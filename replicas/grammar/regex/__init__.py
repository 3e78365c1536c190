"""Texts by pattern, length and format: regular expressions read into trees, automata of them, and rules in the grammar
library's notation. Imports nothing of schemas. The next `format` is a line in string_formats.
"""
