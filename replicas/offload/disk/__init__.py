"""Layers of a CPU's model that are read from disk in every step: the repacked file, direct reads, prefetch, and how
fast they are. May import offload.planning, model and checkpoint. Another way to read a layer in time goes here.
"""
