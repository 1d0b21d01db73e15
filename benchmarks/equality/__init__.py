"""What a client reads through the proxy, beside what vLLM's own server tells it."""
