"""Compilation of kernels for any compute capability without a GPU, many at once, and a faster Triton interpreter.

Compiled kernels report the resources that they would use. Imports the registry, `launch` and `device`, never `gpu`,
`cpu` or `tuning`. Another fact about compiled kernels goes here.
"""
