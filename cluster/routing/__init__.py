"""From a request to the replica that answers it, and on to another when that is lost."""
