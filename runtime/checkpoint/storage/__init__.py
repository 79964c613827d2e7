"""Places of checkpoints: a folder, or a URL."""
