"""Where each layer lies, and how fast the model would be, told from sizes alone: arithmetic that loads nothing.

May import model, kv, execution and checkpoint. A new place for weights is planned here first.
"""
