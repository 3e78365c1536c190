"""Drafters: what proposes the tokens that may follow a sequence's last one, for the scheduler. Pure. May import
engine.sequence. A new drafter is a file here and a line in drafter_registry.py.
"""
