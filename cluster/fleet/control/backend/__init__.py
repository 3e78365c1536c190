"""Looks at the fleet and changes it, behind the protocol `FleetBackend`: Ray Serve's controller, the ingresses and the
nodes of the cluster. Imports `control.state`, `fleet.spec`, `fleet.deployed` and `routing`. Another orchestrator
than Serve goes here, as another `FleetBackend`.
"""
