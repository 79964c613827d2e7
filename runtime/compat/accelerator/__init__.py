"""The device that this process trains on, as programs written for any of them ask it: `get_accelerator()`."""
