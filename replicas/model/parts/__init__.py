"""Parts of a layer: a file for each kind, with its module and its plan, which tells of tensors, ranks and work.

May import sharding.rank_shares, checkpoint, quantization and kernels. A new kind is a new file, and a name in the
unions in model/layers.py.
"""
