"""Models in stages as programs for DeepSpeed know them."""
