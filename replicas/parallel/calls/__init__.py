"""A decoder's calls as messages, and how they are executed where they arrive.

May import parallel.transport, execution, model and gpu. A new method that a leader calls on followers goes here.
"""
