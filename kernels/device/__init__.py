"""Facts and arithmetic about GPUs: compute capabilities, the table of devices, links, precision policy, roofline,
occupancy. Imports no other folder; a new card is a row of `device_table`, a new capability a row of
`compute_capability`.
"""
