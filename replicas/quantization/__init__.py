"""Quantization formats of checkpoints: one class in one file each."""
