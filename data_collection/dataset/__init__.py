"""Datasets of captured rows: schema, card, splits, validation, merging."""
