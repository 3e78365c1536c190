"""KV memory: blocks and their prefixes, the budget, copies on the host for preempted sequences, prefixes that replicas
share through a store, and events of blocks. May import execution, gpu and model. The next place to keep KV goes here.
"""
