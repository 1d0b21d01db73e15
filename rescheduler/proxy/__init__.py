"""One OpenAI-compatible address in front of a deployment."""
