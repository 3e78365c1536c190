"""Parts that all protocols share: admission of requests, prompt windows, collected responses, embeddings.

Imports `routing` and `transport`; no protocol. What a second protocol needs moves here.
"""
