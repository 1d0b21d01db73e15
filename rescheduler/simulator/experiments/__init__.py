"""Running simulations side by side: their cells, where they are computed, and what is written."""
