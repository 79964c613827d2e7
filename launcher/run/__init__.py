"""One job from options to exit code: read, plan, do. It may import every folder but command_line."""
