"""One engine serving one model: loading, scheduling, running, text."""
