"""Weights that do not fit a device: which layers stay, and how the others come from the host's memory or a disk, one
ahead of the computation. Layers, lowest first: planning, disk, device, renewal. May import model, execution, gpu,
kv and checkpoint. No modules at this level.
"""
