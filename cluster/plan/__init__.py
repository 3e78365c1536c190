"""Which GPUs to rent for a load: a trace, prices, and fleets in virtual time."""
