"""Models that only generate or evaluate: the engine that exists without an optimizer, in evaluation mode."""
