"""torch's own profile of the steps that are traced.

torch allows one profile at a time in a process, and the program may have its own. In torch 2.13, starting a
second profile, or ending one that a second one has replaced, raises, loses the program's events, or crashes
the process. So the program's profile has precedence: ours does not start while it runs, and is given up
without being ended if the program has begun one meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

MAX_PROFILE_BYTES = 512 << 20


class TorchProfile:
    """The process's torch profile; `problem` says why there is none, "" if there is one."""

    def __init__(self) -> None:
        self.problem = ""
        self._profile: Any = None
        self._thread = 0  # the thread that began the profile; only this one may end it

    @property
    def is_on(self) -> bool:
        return self._profile is not None

    def warm_up(self) -> None:
        """Take the cost of a process's first profile out of the first step that is traced."""
        if sys.modules.get("torch") is None or _is_another_on(None):
            return
        with contextlib.suppress(RuntimeError):
            profile = _new_profile()
            profile.start()
            profile.stop()

    def start(self) -> None:
        if sys.modules.get("torch") is None:
            self.problem = "torch's operators are missing: the program had not loaded torch"
        elif _is_another_on(None):
            self.problem = "torch's operators are missing: the program had a profile of its own under way"
        else:
            try:
                self._profile = _new_profile()
                self._profile.start()
            except RuntimeError as error:
                self._profile = None
                self.problem = f"torch's operators are missing: its profile did not start: {error}"
            self._thread = threading.get_ident()

    def write(self, path: str) -> str:
        """End the profile and write it; return why it could not be written, or ""."""
        profile = self._profile
        if profile is None:
            return self.problem
        if threading.get_ident() != self._thread:  # the profile stays for `end`
            return "torch's operators are missing: the last step ended in another thread than the first"
        self._profile = None
        if _is_another_on(profile):
            return "torch's operators are missing: the program began a profile of its own meanwhile"
        try:
            profile.stop()
            profile.export_chrome_trace(path)
            nbytes = os.path.getsize(path)
        except (OSError, RuntimeError) as error:  # e.g. a full disk
            with contextlib.suppress(OSError):
                os.unlink(path)
            return f"torch's profile was not written: {error}"
        if nbytes <= MAX_PROFILE_BYTES:
            return ""
        os.unlink(path)
        return (
            f"torch's profile has {nbytes >> 20} MiB, and at most {MAX_PROFILE_BYTES >> 20} MiB are brought; "
            "trace fewer steps"
        )

    def end(self) -> None:
        """End the profile with the program: a process that exits with a running profile crashes."""
        profile, self._profile = self._profile, None
        if profile is not None and threading.get_ident() == self._thread and not _is_another_on(profile):
            with contextlib.suppress(RuntimeError):
                profile.stop()

    def forget(self) -> None:
        """Forget the profile in a forked child, which cannot end it."""
        self._profile = None


def _new_profile() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _is_another_on(ours: Any) -> bool:
    """Tell whether the program has a profile running, or has ended `ours` by starting one.

    torch does not say whose profile is running, so all Python objects are searched: 0.1 s for a million.
    """
    import gc

    from torch.autograd import profiler

    own = None if ours is None else ours.profiler
    if own is not None and not profiler._is_profiler_enabled:
        return True
    return any(
        type(one) is profiler.profile and one is not own and one.entered and one.kineto_results is None
        for one in gc.get_objects()
    )
