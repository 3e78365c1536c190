"""Generator of docs/api.md from the protos, the OpenAPI document and the sources, and of that document's error codes.

tools/reference_pages.py calls it. A new section is a module here and a line of `write_reference`.
"""
