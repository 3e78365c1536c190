"""How processes reach each other: message pipes, heartbeats, collectives, rendezvous, errors, shared files and shared
host memory. May import kernels, model, quantization, checkpoint, kv and execution, nothing else of parallel. A new
channel between processes goes here.
"""
