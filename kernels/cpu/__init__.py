"""Operators on a CPU: `CpuOps`, attention in torch where there is no C compiler, and bounds on rounding errors.

Imports its own folders and the contract, but no Triton. A new operator is a method of `CpuOps`; its C goes to
`c_kernels`, a linear layer to `layers`.
"""
