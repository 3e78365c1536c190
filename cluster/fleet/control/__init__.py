"""Runs the control plane, an actor of its own: starts it, says how it is reached, and builds it from `state`,
`backend`, `reconciler` and `rpcs`, which do not import these modules. Imports those folders, `fleet.spec`, `metrics`,
`security` and `transport`; `service` starts it. What the control plane does goes into a folder, how its process lives
goes here.
"""
