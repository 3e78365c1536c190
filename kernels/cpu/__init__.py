"""The contract on a CPU: `CpuOps`, attention in torch where there is no C compiler, and bounds of rounding.

Imports its own folders and the contract, no Triton.
"""
