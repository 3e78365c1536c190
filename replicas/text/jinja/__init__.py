"""A Jinja sandbox whose time and size are bounded, for templates that come with checkpoints.

Imports nothing of Motley. The next filter or method that templates use goes here.
"""
