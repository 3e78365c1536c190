"""What a model's text means: its reasoning, its answer and its calls of tools, found while it is written."""
