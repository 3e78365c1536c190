"""The control plane: how many replicas there are to be, who says so, and what becomes of it."""
