"""8-bit weights and activations: int8 by dp4a or on tensor cores, fp8 on tensor cores."""
