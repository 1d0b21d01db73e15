"""`headway advise`: whether forecasting pays on a trace."""
