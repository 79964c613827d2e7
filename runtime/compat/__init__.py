"""Calls that exist only for programs written for DeepSpeed. No other folder of the runtime imports them."""
