"""Templates that come with checkpoints: Jinja's sandbox, in a process that limits of the operating system end.

May import host. The next filter or method that templates use goes into template_sandbox.
"""
