"""Management of host memory pages: prefaulted ahead of use, mapped from files, or left until they are written.

Imports only `cpu.c_kernels`, and, except for `lazy_pages`, no torch. Another way to get or give back pages goes here.
"""
