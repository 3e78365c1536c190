"""Moves messages between ingress and replicas at less than one call each: streams of one replica share a connection,
short requests share a call. Imports `routing.attempt`. Another way to carry messages goes here.
"""
