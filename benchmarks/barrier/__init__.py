"""Whether data-parallel ranks wait for the fullest of them, and what routing makes of it."""
