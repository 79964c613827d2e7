"""`python -m dslaunch` is the `dslaunch` command."""

from .launcher.program import run

if __name__ == "__main__":
    run()
