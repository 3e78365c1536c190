"""Benchmark of routers on simulated fleets, in virtual time, beside the optimum. A new baseline is a row in
`baseline_routers.BASELINES`, with the name of a routing policy.
"""
