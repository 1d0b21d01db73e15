"""`headway serve` as a command: its listeners, endpoints and limits."""
