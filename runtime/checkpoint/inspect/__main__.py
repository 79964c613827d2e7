"""`python -m dslaunch.runtime.checkpoint.inspect JSON`: the process that `dslaunch checkpoint` starts.

The exit code is that of command.main(); 2 where torch cannot be imported.
"""

from __future__ import annotations

import sys

from ...errors import UserError
from .last_line import tell


def run(request: str) -> int:
    """Run command.main()."""
    try:
        import torch  # noqa: F401  # here: it alone depends on what else the machine has
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # an incomplete installation raises any error
        reason = str(error).strip().partition("\n")[0]
        tell(
            f"dslaunch checkpoint needs torch, and {sys.executable} cannot import it: "
            f"{type(error).__name__}: {reason}; install a torch for this machine, then try: "
            f"{sys.executable} -c 'import torch'"
        )
        return UserError.exit_code
    from .command import main  # imported at need: it imports torch

    return main(request)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
