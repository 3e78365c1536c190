"""Model families: each is a small description of how its config.json maps to the one decoder."""
