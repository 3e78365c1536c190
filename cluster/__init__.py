"""The service around the replicas: its APIs, routing, fleet and life on Ray Serve.

Imports `motley.replicas` and `motley.kernels`. The modules at the root are what every folder may import (errors,
asyncio helpers, processes), and so are `protos` and `ray_compat`, Ray's private parts; anything else goes into a
folder. Order, lower first: security, transport, routing, metrics, api, prefix_store, fleet, simulation, service.
"""
