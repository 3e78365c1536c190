"""Operators on a GPU: `GpuOps`, its linear layers, and the cache of launch configs.

Imports the registry and the families of kernels; a new weight format gets a layer class here.
"""
