"""`python -m dslaunch` is the `dslaunch` command."""

from .launcher.command_line.main import run

if __name__ == "__main__":
    run()
