"""Measurements of one engine on this machine, side by side with the peers that are installed."""
