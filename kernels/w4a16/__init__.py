"""int4 weights, half-precision activations."""
