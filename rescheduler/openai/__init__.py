"""The OpenAI protocol: requests, responses, streams, text continued after a move."""
