"""Sides of a comparison: Motley and its peers, each in a process of its own. A new peer is a `side_….py` and a row of
`SIDES`.

Imports checkpoints and processes of this package.
"""
