"""A checkpoint as files: what is in its folder, its tensors read and digested, and the cache of repacked weights.

May import host and kernels, never model. What else is read of a checkpoint's files goes into files. How a decoder is
made of the tensors is in loading/.
"""
