"""Link to a store of shared prefixes, the values it has had, which prefixes are popular, statistics, and what rounding
costs. May import kv, kv.store and execution. The next fact about shared prefixes goes here.
"""
