"""Stores prompt prefixes in Redis, for any replica to read what another computed; whatever Redis does costs a miss and
no time. Imports `motley.replicas` and the root of `motley.cluster`, no other folder, as every replica imports it.
Another store that implements `PrefixStore` goes here.
"""
