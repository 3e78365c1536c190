"""Offload of weights: which layers stay in the device's memory, and how the others come from the host or from disk, one
ahead of the layer that computes.
"""
