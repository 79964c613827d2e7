"""Engine, initialize() and what they are made of. It may import everything but compat."""
