"""How calls come in and answers go out, whatever the protocol: HTTP and gRPC."""
