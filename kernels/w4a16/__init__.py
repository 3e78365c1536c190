"""Linear layers with int4 weights and half-precision activations: GEMV, GEMM, and dequantization for torch.matmul.

Imports `launch`, `device` and `pointwise.split_k`; a further kernel gets a file here and a line in `int4_operations`.
"""
