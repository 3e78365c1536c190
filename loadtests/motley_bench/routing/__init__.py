"""Benchmark of routers on simulated fleets, in virtual time, beside the optimum. A new baseline is a class and a row in
`baseline_routers.BASELINES`.
"""
