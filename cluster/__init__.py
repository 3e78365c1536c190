"""The service: ingress, protocols, routing and the life of a Ray Serve application."""
