"""`dslaunch checkpoint`: lists, compares and verifies."""
