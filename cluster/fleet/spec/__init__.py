"""Reads what a fleet is to be, from a YAML file or from flags, and compares two such fleets.

Pure but for reading files; imports `prefix_store` and `routing.policy` for the names of stores and of policies, and no
other folder of `fleet`. A new key of the fleet file is a field of the part that it belongs to (`pool_spec`,
`engine_spec`, `service_spec`, …), and a row of `fleet_flags` if `motley serve` has a flag for it.
"""
