"""The operators on a CPU: C kernels built on the machine, and torch's own where there is no compiler."""
