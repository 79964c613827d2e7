"""`python -m dslaunch` is the `dslaunch` command."""

from .launcher.cli import main

if __name__ == "__main__":
    main()
