"""Quantization formats: one class in one file each."""
