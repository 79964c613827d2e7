"""`init_inference()` with DeepSpeed's names: its config, and what each key comes to here."""
