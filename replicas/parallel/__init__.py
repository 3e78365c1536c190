"""One model on several devices, each with a process of its own.

Layers, lowest first: transport, calls, planning, follower and leader. May import everything below the engine, never
the engine. No modules at this level.
"""
