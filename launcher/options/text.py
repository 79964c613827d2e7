"""Options that are names: checked for form, before they are used."""

from __future__ import annotations

from ..inputs.host import MAX_LABEL_LENGTH, USER_RULE, is_ipv6, is_user, why_no_name

MAX_JOB_ID_LENGTH = 200

_ONE_COLON = "':' may stand only in an IPv6 address"


def address(value: str) -> str:
    """Read a host's name or IP address; brackets around an IPv6 address are taken off."""
    text = value.strip()
    if is_ipv6(text[1:-1]) and text[:1] + text[-1:] == "[]":
        return text[1:-1]
    why = "" if is_ipv6(text) else _ONE_COLON if ":" in text else why_no_name(text)
    if not why and not is_ipv6(text) and not _can_be_looked_up(text):
        why = f"DNS knows no such name: between its dots stand 1 to {MAX_LABEL_LENGTH} characters"
    if why:
        raise ValueError(
            f"{value[:200]!r}: {why}; give a host's name or an IP address, and the port with --master_port"
        )
    return text


def _can_be_looked_up(name: str) -> bool:
    """Tell whether DNS could know the name. This is not required in a hostfile, where a name may be an alias
    of ~/.ssh/config.
    """
    return all(0 < len(one) <= MAX_LABEL_LENGTH for one in name.removesuffix(".").split("."))


def job_id(value: str) -> str:
    """Read the name of a job, which the nodes of the job compare."""
    if len(value) > MAX_JOB_ID_LENGTH or not value.isprintable():
        raise ValueError(
            f"{value[:80]!r} is no name for a job, which has at most {MAX_JOB_ID_LENGTH} characters, all of "
            "which can be printed; give a shorter one, e.g. $SLURM_JOB_ID"
        )
    return value


def user(value: str) -> str:
    """Read the name of a user, which becomes a word of ssh's command line with --launcher=openssh."""
    if not is_user(value):
        raise ValueError(f"{value[:200]!r} is not a user: its name {USER_RULE}; write e.g. ada")
    return value
