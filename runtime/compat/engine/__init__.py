"""The engines as programs for DeepSpeed know them, and the way to them."""
