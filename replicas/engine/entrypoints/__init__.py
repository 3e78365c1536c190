"""How an engine is reached: worker for a service, offline as a library, null_engine without a device.

May import every folder but simulated and profiling. The next way to run an engine goes here.
"""
