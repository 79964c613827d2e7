"""What a model computes: floating-point operations, latency and parameters of each module."""
