"""Updates of a model's weights while it serves: new values are checked, built beside the old ones, and adopted between
two steps.
"""
