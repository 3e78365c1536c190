"""Edge in front of the ingress: HAProxy, TLS, ports."""
