"""Commands beside running a job. Each module has a click command named `command`, loaded when it is called."""
