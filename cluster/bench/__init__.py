"""Benchmarks of a running service, by clients in processes of their own."""
