"""Simulates fleets in virtual time: traffic, routers and the optimum, on replicas that compute nothing.

Imports `routing`, whose predictions and policies it drives; no other folder of `motley.cluster`. Another kind of
traffic goes into `traffic`; another way to choose a replica is a policy of `routing.policy`.
"""
