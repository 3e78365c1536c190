"""Weights in tiers: which layers stay in memory, and how the others come from disk, one ahead of the computing."""
