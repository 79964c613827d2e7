"""`python -m dslaunch.runtime.plan.config_file NAME`: print a ds_config as JSON, for the launcher.

NAME is what a program would be given: a file of JSON, HJSON or YAML, or base64 of JSON. The exit code is 2
if it cannot be read, and the last line on stderr says why.
"""

from __future__ import annotations

import json
import sys

from ..config.source import read_source
from ..errors import ConfigError


def main() -> int:
    """Return the exit code."""
    try:
        _, values = read_source(sys.argv[1])
    except ConfigError as error:
        print(f"--deepspeed_config {error}", file=sys.stderr)
        return 2
    print(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
