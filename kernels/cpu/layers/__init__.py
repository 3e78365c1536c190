"""Linear layers on a CPU: packing of weights, C and torch kernels, and the choice between these.

The choice depends on the format of the weight and on the measured rounding error. Imports `cpu.c_kernels` and
`cpu.memory`; a new kernel is a class and a line in `linear_choice`.
"""
