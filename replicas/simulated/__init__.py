"""An engine over a device that computes nothing and takes the time that a named GPU would.

Scheduler, KV accounting and, in real time, engine and worker are the real ones. What comes of it is simulated, and
calls itself so wherever it shows.
"""
