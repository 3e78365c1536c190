"""Facts and arithmetic about GPUs: capabilities, devices, links, precision policy, roofline and occupancy.

Imports no other folder; a new card is a row of `device_table`, a new compute capability a row of `compute_capability`.
"""
