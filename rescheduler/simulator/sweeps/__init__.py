"""Many settings at once, on many processes, resumable."""
