"""How much fits: whether a model fits a device and how fast it would be, told from headers, and how many KV blocks and
tokens an engine has. May import loading, offload, kv, execution, gpu, model, quantization and checkpoint. The next
question of `motley fit` goes here.
"""
