"""FairBatching: what one engine computes in its next step, and how much prefill it can take on."""
