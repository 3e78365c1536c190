"""The first process of a divided model: it starts the followers, calls them, and stands for the whole model to the
engine. May import parallel.transport, calls and planning, execution, loading, gpu and model, never follower. A new kind
of leader model or runner goes here.
"""
