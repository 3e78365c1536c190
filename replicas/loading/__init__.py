"""From a checkpoint's folder to a decoder that is ready to run, whole or in part, with digests that are known already
and operators that suit the device; and whether that can work, asked before anything is started. May import model,
offload, quantization, text, execution and checkpoint. The next way to load or update weights goes here.
"""
