"""Security of a file of OpenSSH's, which dslaunch obeys if only this user and root can have written it."""

from __future__ import annotations

import os
import stat


def why_insecure(found: os.stat_result) -> str:
    """Return why the file may not be obeyed, with what to do; empty if it may be.

    Source: OpenSSH 9.2p1 readconf.c (read_config_file_depth), with Debian's exception: the group may write if
    this user is its only member
    """
    if found.st_uid not in (0, os.getuid()):
        return (
            f"it belongs to the user with number {found.st_uid}, who may write to it, and what it says runs "
            "commands as you (ProxyCommand), so ssh refuses it, too; make it yours or root's with chown"
        )
    by_group = found.st_mode & stat.S_IWGRP and not _is_of_this_user_alone(found.st_gid)
    if by_group or found.st_mode & stat.S_IWOTH:
        return (
            f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}), and what it says runs "
            "commands as you (ProxyCommand), so ssh refuses it, too; take that away with chmod go-w"
        )
    return ""


def _is_of_this_user_alone(gid: int) -> bool:
    import grp
    import pwd

    us = os.getuid()
    try:
        members, name = grp.getgrgid(gid).gr_mem, pwd.getpwuid(us).pw_name
    except KeyError:
        return False
    users = {one.pw_uid for one in pwd.getpwall() if one.pw_gid == gid}
    return users <= {us} and set(members) <= {name} and bool(users or members)
