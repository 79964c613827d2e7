"""`python -m dslaunch` is the `dslaunch` command."""

from .launcher.cli import run_command

if __name__ == "__main__":
    run_command()
