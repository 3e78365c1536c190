"""Prompt prefixes shared through Redis: any replica reads what any other computed, and Redis can never hurt."""
