"""Parameters: where each lies in a flat buffer, and its placeholder while the values are elsewhere."""
