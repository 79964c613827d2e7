"""What the process imports from which rehearsals are forked."""

import importlib
from contextlib import suppress

for _name in (
    "dslaunch.runtime.compat.engine.initialize",
    "transformers.models.llama.modeling_llama",
    "dslaunch.runtime.plan.answer",
):
    with suppress(ImportError):
        importlib.import_module(_name)
