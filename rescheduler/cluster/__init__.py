"""The cluster as policies see it."""
