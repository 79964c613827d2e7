"""Weights in transformers' format: a folder of safetensors or of torch.save, read box by box."""
