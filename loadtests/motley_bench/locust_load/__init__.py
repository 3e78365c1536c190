"""Load by Locust: users of each protocol, the shapes of a load, and the series that are measured.

Imports `load` for requests and the description of the service. A new protocol is a user here and a name in the
locustfile; a new shape is a line of `load_shapes.SHAPES`.
"""
