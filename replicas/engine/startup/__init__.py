"""From a name and a configuration to an engine that is ready: everything is chosen, built, warmed up and measured here.

May import every folder but simulated and profiling; only engine.entrypoints, simulated, profiling and the start of a
service import it. The next automatic choice goes here.
"""
