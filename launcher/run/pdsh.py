"""`--launcher=pdsh`: each host by an ssh of its own, as pdsh reaches it, without pdsh.

pdsh passes on no input, so agents that it starts would have to connect back to an open port of this machine,
with a token that `ps` shows, and what they are sent would not be encrypted. An ssh is itself the stream that
an agent needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..options import Options
from ..options.backend import OPENSSH, BackendOptions

SSH_WORDS = "PDSH_SSH_ARGS_APPEND"
_AS_IT_IS = ("PDSH_RCMD_TYPE", "ssh")  # says what is done


def as_openssh(options: Options, environ: Mapping[str, str], *, say: Callable[[str], None]) -> Options:
    """The options with the launcher that takes pdsh's place; `say` is told what is done."""
    words = tuple(environ.get(SSH_WORDS, "").split())  # as pdsh splits it
    lines = ["--launcher=pdsh: hosts are reached by the system's ssh, and pdsh is not run"]
    if words:
        lines.append(f"ssh gets {SSH_WORDS}={' '.join(words)}")
    unused = sorted(
        name
        for name, value in environ.items()
        if name.startswith("PDSH_") and name != SSH_WORDS and (name, value) != _AS_IT_IS
    )
    if unused:
        lines.append(f"no effect: {', '.join(unused)}")
    say("; ".join(lines))
    return options._replace(backend=BackendOptions(launcher=OPENSSH, launcher_args=words))
