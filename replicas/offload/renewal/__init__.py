"""New weights for a model that is offloaded: changed parts are written beside the old ones.

May import all of offload, model, execution and checkpoint; imported by loading alone. What else changes while a model
serves goes here.
"""
