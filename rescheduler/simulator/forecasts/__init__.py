"""What the simulated policies know of requests: exact, recorded, erroneous."""
