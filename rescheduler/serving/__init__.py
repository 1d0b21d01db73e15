"""Serving a prefill/decode deployment: the proxy in front of it, and how it is started."""
