"""The runner of one accelerator: graphs of decode steps, tokens chosen on the device, and state that stays there. May
import execution, grammar and kernels. What one device does on its own goes here; several devices go to parallel.
"""
