"""BalanceRoute's scores, its released solver, and the expected overflow."""
