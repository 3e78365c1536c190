"""Tensors from disk to memory: read ahead, into reused buffers, each byte once, digested on the way; each tensor taken
once, with the proof that none is left over. May import checkpoint.files. The next way to read tensors goes here.
"""
