"""Layers of a GPU's model that are copied from pinned memory, or read from disk, in every step.

May import offload.planning and offload.disk.
"""
