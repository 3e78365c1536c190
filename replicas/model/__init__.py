"""Description of a model: its configuration, the layout of its tensors, the layers and the decoder, and the time that
they take by the roofline. May import checkpoint, quantization and kernels. A family's differences go to families/,
a new kind of attention or of feed-forward part to parts/.
"""
