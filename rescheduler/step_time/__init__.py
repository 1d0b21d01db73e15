"""How long a step of an engine takes: the model, its fit, the log it is fitted to."""
