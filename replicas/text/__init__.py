"""Between text and tokens: tokenizers, chat templates, tools.

May import checkpoint.files and host, never the engine. Loose here is what both tokenizer/ and chat/ need; the next
reader or writer of text is a folder beside them.
"""
