"""Checks API keys, and without keys that a call comes from this machine.

Imports errors only. A new kind of credential goes here, behind `CallGuard`.
"""
