"""`--launcher=pdsh`: each host by an ssh of its own, as pdsh reaches it, without pdsh.

pdsh passes on no input, so agents that it starts would have to connect back to an open port of this machine,
with a token that `ps` shows, and their input would not be encrypted. An ssh is itself the stream that an
agent needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..options import Options
from ..options.backend import OPENSSH, BackendOptions, check_ssh_options

_FOR_SSH = ("PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND")  # words in the order in which ssh gets them
_AS_IT_IS = ("PDSH_RCMD_TYPE", "ssh")  # the line on stderr that reports it
_HOST_AND_USER = ("%h", "-l%u", "-l %u")  # in PDSH_SSH_ARGS; we say these ourselves


def as_openssh(options: Options, environ: Mapping[str, str], *, say: Callable[[str], None]) -> Options:
    """Return the options with the launcher that takes pdsh's place; `say` gets a line about it.

    Errors: LaunchError as check_ssh_options
    """
    given = [name for name in _FOR_SSH if environ.get(name)]
    words = tuple(word for name in given for word in _words(environ[name]))
    check_ssh_options(words, " and ".join(given))
    lines = ["--launcher=pdsh: hosts are reached by the system's ssh, and pdsh is not run"]
    if words:
        lines.append(f"ssh gets {' '.join(words)} ({', '.join(given)})")
    unused = sorted(
        name
        for name, value in environ.items()
        if name.startswith("PDSH_") and name not in _FOR_SSH and (name, value) != _AS_IT_IS
    )
    if unused:
        lines.append(f"no effect: {', '.join(unused)}")
    say("; ".join(lines))
    return options._replace(backend=BackendOptions(launcher=OPENSSH, launcher_args=words))


def _words(text: str) -> list[str]:
    """Split them as pdsh does, which knows no quotes."""
    text = " ".join(text.split())
    for one in _HOST_AND_USER:
        text = f" {text} ".replace(f" {one} ", " ")
    return text.split()
