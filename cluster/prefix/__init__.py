"""Prefix cache shared through Redis: any replica reads KV that others computed; a failing Redis fails no request."""
