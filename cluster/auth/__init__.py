"""Authentication: who may call the service."""
