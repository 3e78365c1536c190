"""Sampling of tokens from logits on the device, in integer arithmetic, so that every card samples the same tokens.

Imports `launch`, `device` and `pointwise.pointwise_operation`; a further sampling filter goes into `sample_kernels` and
`sample_reference`.
"""
