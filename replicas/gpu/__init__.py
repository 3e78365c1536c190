"""The runner of one accelerator: graphs of decode steps, tokens chosen on the device, state that stays there, and KV
copies beside the steps. May import execution, grammar and kernels. What one device does on its own goes here; several
devices go to parallel.
"""
