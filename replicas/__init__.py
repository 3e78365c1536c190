"""One engine that serves one model: loading, scheduling, computing, text.

May import motley.kernels, never motley.cluster. Every folder may import host. Loose here lies only what every folder
needs: types, errors, engine_config, sampling_params, and how values, sizes and JSON are read and quoted; replica.py is
the Serve deployment on top of it all.
"""
