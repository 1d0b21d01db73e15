"""`headway doctor`: what works here, and what an engine forecasts now."""
