"""KV outside the replica: sealed records, the protocol of a prefix store, its worker threads, and a store in memory.

May import types and errors; knows no scheduler. A new operation of a store goes here; a new kind of store implements
PrefixStore.
"""
