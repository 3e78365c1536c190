"""C kernels in csrc/, built on the machine, as functions on tensors.

They are operators, collectives among ranks through shared memory, and SHA-256. Imports no other folder of `cpu`; a new
kernel is a file in csrc/ and a method of `NativeKernels`.
"""
