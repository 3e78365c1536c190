"""Decisions of the scheduler about KV that is elsewhere: which sequence waits for KV from a store, what is saved to
it, and which KV of preempted sequences is copied to the host. Pure. May import kv and engine.sequence. The next
place that KV may come back from goes here.
"""
