"""Transport: how calls come in and answers go out, whatever the protocol, over HTTP and gRPC."""
