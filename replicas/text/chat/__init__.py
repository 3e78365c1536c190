"""Chats: messages and tools checked, in one form whatever the protocol, and the prompt that the model's template makes
of them. May import text.jinja. The next kind of message content goes here.
"""
