"""Which running request is on which instance, and where the next one goes."""
