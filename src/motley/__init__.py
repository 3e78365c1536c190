"""Motley: one quantized language model on a mix of unequal devices."""
