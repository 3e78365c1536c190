"""Linear layers with 8-bit weights and activations, and the quantization of activations.

int8 is multiplied by dp4a or tensor cores, fp8 by tensor cores. Imports `launch`, `device` and `pointwise.split_k`. A
further product gets a file here and a line in the registry.
"""
