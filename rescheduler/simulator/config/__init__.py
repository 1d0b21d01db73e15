"""The settings of a simulation, checked."""
