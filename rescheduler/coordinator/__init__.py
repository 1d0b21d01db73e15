"""The coordinator: places and moves the requests of many proxies."""
