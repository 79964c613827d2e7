"""Engine, initialize() and their parts. It may import everything but compat."""
