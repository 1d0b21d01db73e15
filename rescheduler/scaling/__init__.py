"""How many replicas to run: rules that forecast and rules that react, on simulated days."""
