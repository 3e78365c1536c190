"""Parts that chats of every protocol share: tools, reasoning, speakers' names, and grammars that hold a chat to what it
promised. Imports `api.common`, its `fields` and `parsers`, and `transport`. A new field of chats that several protocols
have goes here.
"""
