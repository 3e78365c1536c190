"""Planner of `motley plan`: which GPUs to rent for a load, from a trace, prices and simulated fleets."""
