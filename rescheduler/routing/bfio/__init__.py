"""BF-IO (Chen et al. 2026): balance the loads to come by an integer program."""
