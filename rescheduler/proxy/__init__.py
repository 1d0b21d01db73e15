"""Requests on their way through a deployment's engines, and their moves between them."""
