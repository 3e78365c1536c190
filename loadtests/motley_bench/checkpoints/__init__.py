"""Checkpoints and models of known shapes with random weights: a shape that a benchmark needs is a row of `SHAPES`.

Imports nothing of this package.
"""
