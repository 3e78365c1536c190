"""Control plane: decides how many replicas each pool has, records the decisions, and carries them out."""
