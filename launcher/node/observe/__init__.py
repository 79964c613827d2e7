"""Facts about a host: its devices, its load, its links, and why a worker failed there."""
