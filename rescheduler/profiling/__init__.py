"""How long an engine's steps take: measured, fitted, kept up to date."""
