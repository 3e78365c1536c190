"""Part of a model that one process holds: the rows and columns of a tensor-parallel rank, the layers of a pipeline
stage, and the exchanges that a decoder needs. May import model and quantization, never parallel. A new way to
divide a model goes here; how processes carry it out goes to parallel.
"""
