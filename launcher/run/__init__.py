"""One job from options to exit code: read, plan, do. It may import everything but command_line."""
