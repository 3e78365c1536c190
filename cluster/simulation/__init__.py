"""Simulation of fleets in virtual time: traffic, routers and the optimum, on replicas that compute nothing."""
