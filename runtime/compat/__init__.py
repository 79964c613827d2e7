"""What exists only because programs written for DeepSpeed call it. Nothing else of the runtime imports it."""
