"""A model cut into stages: layers on other ranks, and micro batches that pass through them."""
