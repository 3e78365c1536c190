"""Layers of a GPU's model that are copied from pinned memory, or read from disk, in every step.

May import offload.planning, offload.disk, execution, gpu, model and checkpoint. Another way to bring a layer to a GPU
in time goes here.
"""
