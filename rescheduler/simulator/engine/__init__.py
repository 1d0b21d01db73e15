"""The compiled engine that moves a simulated cluster on."""
