"""Decides how many replicas there are to be: policies behind `ScalingPolicy`, and the forecasts and arithmetic that
they are made of. Pure; imports `routing.prediction`, and `simulation` in `scaling_simulation` alone. A new policy
is a file and a row of `policy_registry`.
"""
