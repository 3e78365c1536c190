"""Benchmarks of starts: from the start of a process to its first token, and from the kill of a replica to the next
response.
"""
