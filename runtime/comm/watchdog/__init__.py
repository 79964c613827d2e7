"""The thread that explains a hang."""
