"""The operators on a GPU."""
