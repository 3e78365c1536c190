"""One model on several devices: what each rank and stage holds of it, and how they act together."""
