"""New values for a model's weights while it serves: checked, built beside the old ones, taken up between two steps."""
