"""Decides who may call and what a stranger can reach: API keys in `auth`, HAProxy, TLS and ports in `edge`.

Imports the modules at the root of `motley.cluster` alone.
"""
