"""How a Triton kernel is launched: its variant, its config from the tables in `tuned/`, and the protocol of an
operator (shapes, configs, launches, reference problem). Imports `device` alone; families of kernels build on it.
"""
