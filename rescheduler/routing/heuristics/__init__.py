"""Policies of one rule each."""
