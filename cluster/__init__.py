"""Service of a fleet: ingress, protocols, routing and the lifecycle of the Ray Serve application."""
