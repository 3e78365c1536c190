"""Operators on a GPU: `GpuOps`, its linear layers, and the cache of launch configs.

Imports the registry, `device`, `launch` and the families of kernels (`attention`, `pointwise`, `sampling`, `w4a16`,
`w8a8`); a new weight format gets a layer class here.
"""
