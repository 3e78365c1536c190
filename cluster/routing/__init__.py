"""Routing: choose a replica for each request, send it there, and retry it on another replica if that one is lost."""
