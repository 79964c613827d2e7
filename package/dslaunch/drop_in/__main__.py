"""`python -m dslaunch.drop_in`: what to put on PYTHONPATH under a launcher other than dslaunch."""

from __future__ import annotations

import argparse
import shlex
import sys

from . import BIN, FOLDER, PYTHON_VARIABLE

_EPILOG = """\
examples:
  export PYTHONPATH="$(python -m dslaunch.drop_in):$PYTHONPATH"
      `import deepspeed` gets dslaunch, even where DeepSpeed is installed
  eval "$(python -m dslaunch.drop_in --sh)"
      the same, and DeepSpeed's commands: deepspeed, ds_report, zero_to_fp32.py
`dslaunch drop-in install` does it for good, in the environment of its Python.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dslaunch.drop_in",
        description="Print the folder that makes `import deepspeed` get dslaunch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bin", action="store_true", help="print the folder of DeepSpeed's commands instead, for PATH"
    )
    parser.add_argument("--sh", action="store_true", help="print the lines for a shell that set both")
    given = parser.parse_args()
    if given.sh:
        for name, folder in (("PYTHONPATH", FOLDER), ("PATH", BIN)):
            print(f'export {name}={shlex.quote(folder)}"${{{name}:+:${name}}}"')
        print(f"export {PYTHON_VARIABLE}={shlex.quote(sys.executable)}")
    else:
        print(BIN if given.bin else FOLDER)


if __name__ == "__main__":
    main()
