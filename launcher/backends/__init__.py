"""Ways to get one byte stream to one agent on a host."""
