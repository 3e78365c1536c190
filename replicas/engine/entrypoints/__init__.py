"""How an engine is reached: worker for a service, offline as a library, null_engine without a device.

May import startup and streams. The next way to run an engine goes here.
"""
