"""Where checkpoints lie: a folder, or what a URL names."""
