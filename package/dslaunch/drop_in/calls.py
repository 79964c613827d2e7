"""DeepSpeed's calls that mean something else here than by their own names in dslaunch."""

from __future__ import annotations

import argparse
from functools import partial, update_wrapper

from ..runtime.compat.engine import initialize as runtime
from ..runtime.compat.inference import init_inference as inference
from ..runtime.zero import init_context

initialize = update_wrapper(partial(runtime.initialize, is_lenient=True), runtime.initialize)
init_inference = update_wrapper(partial(inference.init_inference, is_lenient=True), inference.init_inference)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, which `initialize(args=...)` reads, and both under
    DeepSpeed's name of before 2020.
    """
    parser = runtime.add_config_arguments(parser)
    old = parser.add_argument_group("deprecated", "DeepSpeed's names of before 2020")
    old.add_argument("--deepscale", action="store_true", help="--deepspeed")
    old.add_argument("--deepscale_config", metavar="FILE", help="--deepspeed_config")
    return parser


class Init(init_context.Init):
    __doc__ = init_context.Init.__doc__

    loses_writes = True
