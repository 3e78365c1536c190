"""Prefix cache outside of a replica: KV of prompt prefixes in sealed records that any replica of the fleet can read."""
