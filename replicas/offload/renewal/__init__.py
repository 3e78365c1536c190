"""New weights for a model that is offloaded: changed parts are written beside the old ones.

May import all of offload; imported by loading alone.
"""
