"""DeepSpeed's calls that mean something else here than by their own names in dslaunch."""

from __future__ import annotations

from functools import partial, update_wrapper

from ..runtime import initialize as runtime
from ..runtime.zero import init

initialize = update_wrapper(partial(runtime.initialize, is_lenient=True), runtime.initialize)


class Init(init.Init):
    __doc__ = init.Init.__doc__

    loses_writes = True
