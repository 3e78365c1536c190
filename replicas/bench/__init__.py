"""Benchmarks of one engine on this machine, side by side with the other engines (peers) that are installed."""
