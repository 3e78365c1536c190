"""Launches of Triton kernels: variants, configs from the tables in `tuned/`, and the protocol of an operator.

The protocol covers shapes, configs, launches and reference problems. Imports only `device`; the families of kernels
build on it. A model whose sizes are to be compiled is a row of `model_shapes`.
"""
