"""The networks that forecast from hidden states, and their checkpoints."""
