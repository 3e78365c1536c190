"""Tokens chosen from logits on the device."""
