"""Routers that learn: an environment over the simulator, a Double DQN, its training and study."""
