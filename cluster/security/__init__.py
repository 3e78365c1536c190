"""Decides who may call and what a stranger can reach: API keys in `auth`, HAProxy, TLS and ports in `edge`.

Imports the modules at the root of `motley.cluster` alone. A new kind of credential goes into `auth`, a new way to keep
strangers out into `edge`.
"""
