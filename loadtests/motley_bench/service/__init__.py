"""Benchmark of what the service itself costs, beside the bare worker and beside a server of plain gRPC."""
