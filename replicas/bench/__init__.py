"""Measurements of one engine on this machine, side by side with the peers that are installed.

May import all of replicas; only profiling and the command line import it. A new benchmark is a new file here and a
command in motley/cli/bench.
"""
