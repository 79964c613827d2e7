"""One machine of the pool, and its properties in every kind of file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple, Protocol

from ..errors import LaunchError
from .env_file import EnvEntry
from .exec_prefix import EXAMPLE, PrefixMistake, prefix_of, read_prefix
from .host_range import RangeMistake, expand

KEYS = (
    "slots",
    "devices",
    "port",
    "user",
    "python",
    "cwd",
    "role",
    "rack",
    "exec_prefix",
)  # besides env.NAME
MAX_SLOTS = 4096  # far above any machine; a larger number is a slip that would start that many processes
MAX_PORT = 65535
MAX_NAME_LENGTH = 253  # DNS's limit for a name
MAX_LABEL_LENGTH = 63  # DNS's limit for the part between two dots of a name

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# '@' and '\' are allowed because names from a directory service contain them.
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+$@\\-]*")
USER_RULE = "is made of letters, digits and _.+-$@\\ and begins with none of +-$@\\"
ROLE_RULE = "is made of small letters, digits and '_', begins with a letter, and has 40 characters at most"
_BRACES = re.compile(r"\{.*\}")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_ROLE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_RACK = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_DEVICE = re.compile(r"[0-9]+|GPU-[0-9A-Za-z-]+|MIG-[0-9A-Za-z/-]+")
_MAX_DEVICE_DIGITS = 4

Pairs = tuple[tuple[str, str], ...]


class Host(NamedTuple):
    """One machine of the pool. Its place in the hostfile is its node rank."""

    # As in the hostfile, without user and brackets; --include, --exclude and all output use this name
    name: str
    slots: int | None  # None for slots=auto: not known before the host was looked at
    # The ids to use, in this order, one per slot; None: 0 to slots - 1.
    devices: tuple[str, ...] | None = None
    user: str | None = None
    port: int | None = None
    python: str | None = None  # the interpreter on that host; may begin with ~/, as may cwd
    cwd: str | None = None
    env: tuple[EnvEntry, ...] = ()
    exec_prefix: tuple[str, ...] | None = None  # None: not given; empty: no prefix, whatever other hosts have
    role: str = ""  # the name of a --role; empty: not given
    rack: str = ""  # hosts of one rack may fail together; empty: not known

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Device ids of all slots, in order.

        Errors: AssertionError with slots=auto, which must be replaced by the number from a look at the host.
        """
        if self.devices is not None:
            return self.devices
        if self.slots is None:
            raise AssertionError(f"the slots of {self.name} were not looked up")
        return tuple(map(str, range(self.slots)))


class Place(Protocol):
    """The place in a file that describes a host."""

    def refusal(self, why: str, *, example: Pairs, key: str = "", name: str = "") -> LaunchError:
        """Return an error with the place, its text, `why`, and the pairs of `example` written as in that
        kind of file.
        """
        ...


def hosts_named(
    target: str, values: Mapping[str, str], env: tuple[EnvEntry, ...], *, place: Place
) -> tuple[Host, ...]:
    """Return the hosts that `target` names, a name, `user@name` or a range of names, with `values` by key.

    Errors: LaunchError with the place for a name, key or value that is not allowed, or if no slots are
    given.
    """
    user, names = _parse_target(target, place)
    for key in values:
        if key not in KEYS:
            raise unknown_key(key, given=values, place=place)
    devices = _parse_devices(values["devices"], place) if "devices" in values else None
    slots = _parse_slots(values, devices, place)
    host_user = _parse_user(values, user, place)
    port = _parse_number(values["port"], "port", MAX_PORT, place) if "port" in values else None
    python, cwd = (_parse_path(values, key, place) for key in ("python", "cwd"))
    prefix = _parse_prefix(values, place)
    role, rack = _parse_role(values, place), _parse_rack(values, place)
    return tuple(
        Host(
            name=name,
            slots=slots,
            devices=devices,
            user=host_user,
            port=port,
            python=python,
            cwd=cwd,
            env=env,
            exec_prefix=None if prefix is None else prefix_of(prefix, name),
            role=role,
            rack=rack,
        )
        for name in names
    )


def is_user(text: str) -> bool:
    """Tell whether `text` can be the name of a user: ssh takes no part of it for an option or a host."""
    return _USER.fullmatch(text) is not None


def why_no_name(text: str) -> str:
    """Return why `text` cannot be the name of a host or an IPv4 address; empty if it can."""
    problem = _name_problem(text)
    return "" if problem is None else problem[0]


def host_key(name: str) -> str:
    """Return a key of all spellings of a name: names are compared without case, IPv6 addresses by value."""
    return str(IPv6Address(name)) if is_ipv6(name) else name.lower()


def spelled(name: str) -> str:
    """Return a key that lines for one host share: for an IPv6 address its value, for any other name its
    text: as in DeepSpeed, names that differ in case are two hosts.
    """
    return host_key(name) if is_ipv6(name) else name


def slots_of_both(first: Host, second: Host) -> Pairs:
    """Return the key=value pairs of one line that can replace two lines of the same host."""
    if first.devices is not None and second.devices is not None:
        return (("devices", ",".join(dict.fromkeys(first.devices + second.devices))),)
    if first.slots is None or second.slots is None:
        return (("slots", "auto"),)
    return (("slots", str(min(first.slots + second.slots, MAX_SLOTS))),)


def is_ipv6(text: str) -> bool:
    """Tell whether `text` is an IPv6 address without brackets, maybe with a zone as in `fe80::1%eth0`."""
    if ":" not in text or not _IPV6.fullmatch(text):
        return False
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def device_id(text: str) -> str | None:
    """Return the device id that `text` means (an index without leading zeros, GPU-... or MIG-...); None if
    it means none.
    """
    if not _DEVICE.fullmatch(text):
        return None
    if not text.isdigit():
        return text
    digits = text.lstrip("0") or "0"
    return digits if len(digits) <= _MAX_DEVICE_DIGITS else None


def unknown_key(key: str, *, given: Mapping[str, str], place: Place) -> LaunchError:
    """Refuse a key that does not exist, with the one that was perhaps meant."""
    left = [known for known in (*KEYS, "env.NAME") if known not in given]
    import difflib

    near = difflib.get_close_matches(key.lower(), left, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return place.refusal(
        f"unknown key {key[:80]!r}{hint}; allowed are {', '.join(KEYS)} and env.NAME",
        example=(("slots", "8"), ("port", "22")),
    )


def _parse_target(target: str, place: Place) -> tuple[str | None, tuple[str, ...]]:
    user, at, name = target.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise place.refusal(
            f"a user, before the last '@', {USER_RULE}",
            example=(("slots", "8"),),
            key="name",
            name="ada@worker-1",
        )
    address = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if is_ipv6(address):
        return user or None, (address,)
    try:
        names = expand(name)
    except RangeMistake as mistake:
        why, instead = str(mistake), "node[01-16]"
        if ":" in name:
            why, instead = "brackets may hold only a range or an IPv6 address", "[fd00::7]"
        raise place.refusal(why, example=(("slots", "8"),), key="name", name=user + at + instead) from None
    for one in names:
        problem = _name_problem(one)
        if problem is not None:
            why, instead = problem
            raise place.refusal(why, example=(("slots", "8"),), key="name", name=user + at + instead)
    return user or None, names


def _name_problem(name: str) -> tuple[str, str] | None:
    """Return why `name` cannot be a host's name, and a name to show instead; None if it can."""
    if _BRACES.search(name):
        return "a range is written with brackets", "node[01-16]"
    if ":" in name:
        before = name.partition(":")[0]
        why = "':' may stand only in an IPv6 address; slots are given as slots=N, an ssh port as port=N"
        return why, before if _NAME.fullmatch(before) else "[fd00::7]"
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"a host's name has {MAX_NAME_LENGTH} characters at most, and this one has {len(name)}",
            "worker-1",
        )
    if not _NAME.fullmatch(name):
        return "a host's name is made of letters, digits and .-_ and begins with none of .-", "worker-1"
    if "." in name and name.replace(".", "").isdigit():
        try:
            IPv4Address(name)
        except ValueError:
            return "an IPv4 address has four numbers from 0 to 255, without zeros in front", "10.0.0.7"
    return None


def _parse_devices(text: str, place: Place) -> tuple[str, ...]:
    devices: list[str] = []
    for piece in text.split(","):
        device = device_id(piece.strip())
        if device is None:
            raise place.refusal(
                f"{piece.strip()!r} is not a device; devices are an index, GPU-... or "
                "MIG-..., joined by commas",
                example=(("devices", "0,2"),),
                key="devices",
            )
        if device in devices:
            raise place.refusal(
                f"device {device!r} is given twice, and one device takes one process",
                example=(("devices", ",".join(dict.fromkeys([*devices, "0", "1"]))),),
                key="devices",
            )
        devices.append(device)
    if len(devices) > MAX_SLOTS:
        raise place.refusal(
            f"{len(devices)} devices are more than {MAX_SLOTS}", example=(("devices", "0,2"),), key="devices"
        )
    return tuple(devices)


def _parse_slots(values: Mapping[str, str], devices: tuple[str, ...] | None, place: Place) -> int | None:
    """Return the number of slots; None for auto."""
    text = values.get("slots")
    if devices is None:
        if text is None:
            raise place.refusal(
                "slots is missing, the number of processes the host takes ('auto': one for "
                "each GPU found there)",
                example=(("slots", "8"),),
            )
        return None if text == "auto" else _parse_number(text, "slots", MAX_SLOTS, place)
    slots = len(devices) if text is None or text == "auto" else _parse_number(text, "slots", MAX_SLOTS, place)
    if text == "auto" or slots != len(devices):
        raise place.refusal(
            f"slots is {text}, but devices names {len(devices)}; each device is one slot, so "
            "slots can be left out",
            example=(("devices", values["devices"]),),
            key="slots",
        )
    return slots


def _parse_user(values: Mapping[str, str], user: str | None, place: Place) -> str | None:
    given = values.get("user")
    if given is None:
        return user
    example = (("slots", "8"), ("user", user or "ada"))
    if not _USER.fullmatch(given):
        raise place.refusal(f"user {USER_RULE}", example=example, key="user")
    if user not in (None, given):
        raise place.refusal(
            f"the user is {user!r} before the name and {given!r} here; give one of them",
            example=example,
            key="user",
        )
    return given


def _parse_number(text: str, key: str, most: int, place: Place) -> int:
    digits = text.lstrip("0")
    if re.fullmatch("[0-9]{1,5}", digits) and int(digits) <= most:
        return int(digits)
    limit = "above 0" if key == "slots" and not re.fullmatch("[0-9]+", digits) else f"from 1 to {most}"
    example = (("slots", "8"),) if key == "slots" else (("slots", "8"), (key, "22"))
    or_auto = ", or 'auto'" if key == "slots" else ""
    raise place.refusal(f"{key} must be a whole number {limit}{or_auto}", example=example, key=key)


def _parse_path(values: Mapping[str, str], key: str, place: Place) -> str | None:
    path = values.get(key)
    if path is None or (path.startswith(("/", "~/")) and "\0" not in path):
        return path
    sample = "/opt/env/bin/python" if key == "python" else "/data/job"
    raise place.refusal(
        f"{key} must be a path on that host that begins with / or ~/",
        example=(("slots", "8"), (key, sample)),
        key=key,
    )


def is_role(text: str) -> bool:
    """Tell whether `text` can be the name of a role."""
    return _ROLE.fullmatch(text) is not None


def _parse_role(values: Mapping[str, str], place: Place) -> str:
    role = values.get("role", "")
    if "role" not in values or is_role(role):
        return role
    example = (("slots", "8"), ("role", "rollout"))
    raise place.refusal(f"the name of a role {ROLE_RULE}", example=example, key="role")


def _parse_rack(values: Mapping[str, str], place: Place) -> str:
    rack = values.get("rack", "")
    if "rack" not in values or _RACK.fullmatch(rack):
        return rack
    example = (("slots", "8"), ("rack", "r12"))
    rule = "is made of letters, digits and '_.:/-', and has 64 characters at most"
    raise place.refusal(f"the name of a rack {rule}", example=example, key="rack")


def _parse_prefix(values: Mapping[str, str], place: Place) -> tuple[str, ...] | None:
    if "exec_prefix" not in values:
        return None
    try:
        return read_prefix(values["exec_prefix"])
    except PrefixMistake as mistake:
        example = (("slots", "8"), ("exec_prefix", f"'{EXAMPLE}'"))
        raise place.refusal(f"exec_prefix: {mistake}", example=example, key="exec_prefix") from None
