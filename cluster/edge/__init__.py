"""What stands before the ingress: HAProxy, TLS, ports."""
