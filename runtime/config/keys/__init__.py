"""What every key of a ds_config means here, a table for each part of it."""
