"""What the engines publish, received and kept as one view."""
