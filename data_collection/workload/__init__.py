"""What drives a model while it is recorded: prompts, arrivals, sampling."""
