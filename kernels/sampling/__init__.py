"""Tokens chosen from logits on the device, in whole numbers, so that every card chooses the same.

Imports `launch`, `device` and `pointwise.pointwise_operation`; a further sampling filter goes into `sample_kernels`
and `sample_reference`.
"""
