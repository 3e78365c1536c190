"""KV of prompt prefixes outside of a replica: sealed records that any replica of the fleet can read."""
