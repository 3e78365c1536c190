"""Linear layers on a CPU: packing of weights, C and torch kernels, and the choice between them by format and measured
rounding error. Imports `cpu.c_kernels` and `cpu.memory`; a new kernel is a class and a line in `linear_choice`.
"""
