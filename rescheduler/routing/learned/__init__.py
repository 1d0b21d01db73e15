"""A router trained by reinforcement (Jain et al. 2025)."""
