"""Finds reasoning, text and tool calls in a model's output while it is written.

Pure, but for the tokenizer. A new style of tool calls is one module here and one row of
`parser_selection.TOOL_PARSERS`.
"""
