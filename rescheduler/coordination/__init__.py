"""Many proxies and one coordinator: what they say to each other, and the proxies' end of it."""
