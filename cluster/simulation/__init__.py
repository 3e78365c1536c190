"""Simulates fleets in virtual time: traffic, routers and the optimum, on replicas that compute nothing.

Imports `routing`, whose directory and predictions it drives; no other folder of `motley.cluster`. Another router to
compare with goes into `baseline_routers`, another kind of traffic into `traffic`.
"""
