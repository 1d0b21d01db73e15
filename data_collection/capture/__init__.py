"""Hidden states out of a running vLLM engine: which rows, whose, and where they go."""
