"""Benchmarks of a running service, by clients in processes of their own, until they move to the distribution `motley-
bench`. May import everything; nothing but the CLI and other benchmarks import it. Another benchmark of the service
is a module here and one in `motley.cli.bench`.
"""
