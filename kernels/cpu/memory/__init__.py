"""Pages of host memory: taken ahead of use, mapped from files, or left until they are written.

Imports `cpu.c_kernels` alone, and, but for `lazy_pages`, no torch.
"""
