"""Parsers of a model's output: find its reasoning, its answer and its tool calls while it is generated."""
