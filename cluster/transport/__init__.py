"""Carries calls in and responses out, whatever their protocol: callers, the access log, bounds for slow clients and
unfinished bodies. Imports `security`. What is of HTTP or gRPC alone goes into the folder of that name.
"""
