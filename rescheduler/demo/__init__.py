"""`headway demo`: the same load with and without moves."""
