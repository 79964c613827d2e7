"""From a model and a ds_config to a trained, checkpointed model."""
