"""Starts, deploys, watches and ends a service on Ray Serve.

May import everything in `motley.cluster`; nothing but the CLI imports it. What runs before Ray goes into `startup`,
what runs on Ray into `deployment`, what outlives a fault into `supervision`.
"""
