"""New values for the weights while the model serves: checked, built beside the old ones, taken up between two steps.

May import loading, offload, gpu, model, quantization and checkpoint, never parallel. A new source of weights goes here.
"""
