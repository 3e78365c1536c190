"""Kernels compiled without a GPU for any compute capability, many at once, and what they would use there; Triton's
interpreter made faster. Imports the registry, `launch` and `device`, never `gpu`, `cpu` or `tuning`.
"""
