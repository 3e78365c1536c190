"""Keeps Ray workers waiting on each node with a replica, with all imported that the next replica needs.

Imports `replicas` and `process_tree`. What a replica imports before loading is listed in `warm_worker`.
"""
