"""Watches the processes of a service, ends what is left of one that was killed, and keeps its folder of logs.

Imports `fleet`, `prefix_store`, `routing` and `security`, and no other folder of `service`. A new process to watch goes
into `watched_processes`.
"""
