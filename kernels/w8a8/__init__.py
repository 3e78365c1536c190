"""Linear layers with 8-bit weights and activations: int8 by dp4a or tensor cores, fp8 by tensor cores, and the
quantization of activations. Imports `launch`, `device` and `pointwise.split_k`; a further product gets a file here
and a line in the registry.
"""
