"""`headway launch`, on this machine or on a Ray cluster."""
