"""Functions that torch.compile leaves alone, in processes that compile nothing, too.

torch's own decorator loads the compiler at the first call, and torch.compiler.disable at once: 800 modules,
which take a second and 70 MB of every process, and most processes never compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F, *, recursive: bool = True) -> F:
    """Let the compiler end its graph where `function` is called; `recursive`: and leave alone what that
    calls.
    """
    once_loaded: Any = _disable_dynamo(function, recursive)

    def call(*args: Any, **kwargs: Any) -> Any:
        # is_compiling() is true while the compiler reads this, so that it reads no further than that.
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return once_loaded(*args, **kwargs)
        return function(*args, **kwargs)

    if not _is_passed_by(call.__code__):
        return once_loaded  # type: ignore[no-any-return]
    return functools.wraps(function)(call)  # type: ignore[return-value]


def _is_passed_by(code: CodeType) -> bool:
    """Let the compiler's hook, which torch has without the compiler, compile no call of this by itself;
    return whether this torch can be told so.
    """
    hook: Any = torch._C._dynamo.eval_frame
    if hasattr(hook, "set_code_exec_strategy"):
        action = hook._FrameAction
        hook.set_code_exec_strategy(code, hook._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(hook, "skip_code"):  # older torch
        hook.skip_code(code)
    else:
        return False
    return True
