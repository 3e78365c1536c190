"""Simulated engine over a device that computes nothing and takes the time that a named GPU would.

Scheduler, KV accounting and, in real time, engine and worker are the real ones. All results are simulated, and are
marked as simulated wherever they are shown.
"""
