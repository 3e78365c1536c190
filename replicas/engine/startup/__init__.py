"""From a name and a configuration to an engine that is ready: everything is chosen, built, warmed up and measured here.

Of the folders only engine.entrypoints, simulated, profiling and bench import it. The next automatic choice goes here.
"""
