"""OpenAI's HTTP API: completions, chats, embeddings, models, tokenize.

Imports `api.common`, `routing` and `transport`. A new endpoint is a method of `openai_protocol`, a route of
`openai_routes` and an operation of `openai_operations`; what is not supported is refused by name in `openai_refused`.
"""
