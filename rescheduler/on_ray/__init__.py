"""Deployments whose engines, proxies and coordinator are actors of a Ray cluster."""
