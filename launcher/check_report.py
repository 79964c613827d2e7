"""What a look at hosts means: problems and warnings as sentences, then what differs, then what is the same everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .errors import EXIT_HOST
from .facts import ClusterFacts, HostFacts
from .host_names import folded
from .reachability import first_reached, who_fails

CLOCK_WARNING_S = 1.0
CLOCK_SAME_S = 0.1
SMALL_BYTES = 1 << 30  # less than this in /dev/shm, /tmp or the job's folder is worth a word
FEW_FILES = 1024  # sockets and files that one process may have open
NUM_VALUES_SHOWN = 8
_FREE = {"tmp": "/tmp", "cwd": "the job's folder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about some hosts. A problem keeps a host from being used, a warning does not."""

    hosts: tuple[str, ...]
    text: str
    is_problem: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fact: its values, the most frequent first, each with its hosts and whether it is the odd one."""

    label: str
    values: tuple[tuple[str, tuple[str, ...], bool], ...]

    @property
    def is_same(self) -> bool:
        return len(self.values) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is to be said of a look."""

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    master: str  # where rank 0 is reached, for people; empty if it was not tried
    master_addr: str | None
    num_usable: int

    @property
    def exit_code(self) -> int:
        return EXIT_HOST if any(one.is_problem for one in self.findings) else 0


def judge(cluster: ClusterFacts) -> Report:
    """What the facts mean."""
    findings = _merged([*_findings_of_hosts(cluster), *_findings_of_cluster(cluster)])
    bad = {host for one in findings if one.is_problem for host in one.hosts}
    master_addr, master = _master(cluster)
    return Report(
        findings=tuple(findings),
        rows=tuple(_rows(cluster)),
        master=master,
        master_addr=master_addr,
        num_usable=len(cluster.hosts) - len(bad),
    )


# Findings.


def _findings_of_hosts(cluster: ClusterFacts) -> Iterable[Finding]:
    has_gpus = any(host.answers.get("gpu", {}).get("num") for host in cluster.hosts)
    has_torch = any(host.answers.get("torch", {}).get("version") for host in cluster.hosts)
    for host in cluster.hosts:
        if host.problem:
            yield _problem(host, host.problem)
            continue
        if host.unanswered:
            yield _problem(
                host,
                f"no answer within {cluster.timeout_s:g} s about {', '.join(host.unanswered)}; "
                "look at the host, or give it more time with --timeout",
            )
        for question, why in host.wrong:
            yield _problem(host, f"its answer about {question} cannot be used: {why}")
        yield from _findings_of_software(host, has_torch=has_torch)
        yield from _findings_of_devices(host, has_gpus=has_gpus)
        yield from _findings_of_room(host)
        yield from _findings_of_clock(host)


def _findings_of_software(host: HostFacts, *, has_torch: bool) -> Iterable[Finding]:
    python = host.answers.get("python", {})
    if python.get("problem") == "No such file or directory":
        yield _problem(
            host,
            f"no Python at {host.python}; every host needs the same path to it, or python= in the hostfile",
        )
    elif python.get("problem"):
        yield _problem(host, f"{host.python} does not run: {python['problem']}; repair it there")
    torch = host.answers.get("torch", {})
    if torch.get("problem") and not python.get("problem"):
        text = f"PyTorch cannot be imported by {host.python}: {torch['problem']}; install it there"
        yield Finding(hosts=(host.name,), text=text, is_problem=has_torch)
    cwd = host.answers.get("cwd", {})
    if cwd.get("problem"):
        yield _problem(
            host,
            f"cannot use the folder {host.cwd}: {cwd['problem']}; "
            "start from a folder that has the same path on every host",
        )


def _findings_of_devices(host: HostFacts, *, has_gpus: bool) -> Iterable[Finding]:
    if "gpu" not in host.answers or not has_gpus or host.num_slots is None:
        return
    num_gpus = host.answers["gpu"]["num"]
    beyond = [one for one in host.devices if one.isdigit() and int(one) >= num_gpus]
    if beyond:
        there = f"there is {num_gpus} GPU" if num_gpus == 1 else f"there are {num_gpus} GPUs"
        yield _problem(
            host,
            f"slots={host.num_slots}, but {there}; correct slots= in the hostfile, use --include, or look for the "
            "missing GPU with nvidia-smi",
        )


def _findings_of_room(host: HostFacts) -> Iterable[Finding]:
    shm = host.answers.get("shm")
    if shm is not None and (shm["problem"] or shm["size_bytes"] < SMALL_BYTES):
        why = f"cannot be used: {shm['problem']}" if shm["problem"] else f"holds {_bytes(shm['size_bytes'])}"
        yield _warning(
            host,
            f"/dev/shm {why}; data loaders and NCCL need 1 GiB or more (docker run: --shm-size=16g or --ipc=host)",
        )
    for question, name in _FREE.items():
        disk = host.answers.get(question, {"problem": "", "free_bytes": SMALL_BYTES})
        if disk["problem"] and question != "cwd":
            yield _warning(host, f"{name} cannot be used: {disk['problem']}")
        elif not disk["problem"] and disk["free_bytes"] < SMALL_BYTES:
            yield _warning(host, f"{_bytes(disk['free_bytes'])} free in {name}; make room")
    system = host.answers.get("system")
    if system is not None and 0 <= system["nofile"] < FEW_FILES:
        yield _warning(
            host, f"ulimit -n is {system['nofile']}; large jobs need more open files, {FEW_FILES} or more"
        )


def _findings_of_clock(host: HostFacts) -> Iterable[Finding]:
    if host.clock_offset_s is not None and abs(host.clock_offset_s) - host.clock_error_s > CLOCK_WARNING_S:
        side = "ahead of" if host.clock_offset_s > 0 else "behind"
        yield _warning(
            host,
            f"its clock is {abs(host.clock_offset_s):.1f} s {side} this machine's (+- {_ms(host.clock_error_s)}); "
            "logs and file times will not fit together: let a time service such as chrony run",
        )


def _findings_of_cluster(cluster: ClusterFacts) -> Iterable[Finding]:
    yield from _differences(cluster)
    yield from _doubles(cluster)
    first = cluster.hosts[0]
    if cluster.listening_problem:
        owner = first.answers.get("port_owner", {}).get("owner")
        text = cluster.listening_problem + (f" by {owner}" if owner else "")
        if cluster.is_port_fixed:
            yield _problem(first, f"{text}; choose another --master_port")
        else:
            yield _warning(first, f"{text}; a job takes another, unless --master_port asks for this one")
    elif cluster.candidates:
        problems = _reach(cluster)
        if first_reached(cluster.candidates, problems) is None:
            for node_rank, text in who_fails(first.name, cluster.port, cluster.candidates, problems):
                yield Finding(hosts=(_name(cluster, node_rank),), text=text, is_problem=True)
    elif len(cluster.hosts) > 1:
        others = tuple(host.name for host in cluster.hosts[1:] if not host.problem)
        if others:
            text = f"whether they reach node 0 was not tried, because {first.name} cannot be used"
            yield Finding(hosts=others, text=text, is_problem=False)


def _differences(cluster: ClusterFacts) -> Iterable[Finding]:
    """Versions that must be the same."""
    for row in _rows(cluster):
        if row.label in ("Python", "PyTorch", "NVIDIA driver") and not row.is_same:
            there = [(value, hosts) for value, hosts, _ in row.values if value != "none"]
            if len(there) > 1:
                shown = "; ".join(f"{value} on {folded(hosts)}" for value, hosts in there)
                odd = tuple(host for _, hosts in there[1:] for host in hosts)
                text = f"{row.label} is not the same everywhere: {shown}; install the same version"
                yield Finding(hosts=odd, text=text, is_problem=False)


def _doubles(cluster: ClusterFacts) -> Iterable[Finding]:
    """Hosts that are one machine under two names."""
    machines: dict[tuple[str, str], list[str]] = {}
    for host in cluster.hosts:
        system = host.answers.get("system")
        if system is not None and system["boot_id"]:
            machines.setdefault((system["boot_id"], system["hostname"]), []).append(host.name)
    for (_, hostname), names in machines.items():
        if len(names) > 1:
            text = f"are one machine, {hostname}: two ranks will use the same GPU; give a machine one line"
            yield Finding(hosts=tuple(names), text=text, is_problem=False)


def _problem(host: HostFacts, text: str) -> Finding:
    return Finding(hosts=(host.name,), text=text, is_problem=True)


def _warning(host: HostFacts, text: str) -> Finding:
    return Finding(hosts=(host.name,), text=text, is_problem=False)


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal sentences once, with all their hosts; problems first."""
    hosts_of: dict[tuple[bool, str], list[str]] = {}
    for one in findings:
        hosts_of.setdefault((not one.is_problem, one.text), []).extend(one.hosts)
    merged = [
        Finding(hosts=tuple(hosts), text=text, is_problem=not is_warning)
        for (is_warning, text), hosts in hosts_of.items()
    ]
    return sorted(merged, key=lambda one: not one.is_problem)


# Rank 0's address.


def _reach(cluster: ClusterFacts) -> dict[int, tuple[str, ...]]:
    return {host.node_rank: host.reach for host in cluster.hosts if host.reach is not None}


def _master(cluster: ClusterFacts) -> tuple[str | None, str]:
    """What MASTER_ADDR would be, and a sentence on it."""
    problems = _reach(cluster)
    if not problems:
        return None, ""
    found = first_reached(cluster.candidates, problems)
    if found is None:
        return None, ""
    text = f"{found}, port {cluster.port}: reached by all that were asked"
    tried = cluster.candidates[: cluster.candidates.index(found)]
    for place, candidate in enumerate(tried):
        failed = [_name(cluster, rank) for rank, of_node in problems.items() if of_node[place]]
        text += f"; {candidate} is not reached by {folded(failed)}"
    return found, text


def _name(cluster: ClusterFacts, node_rank: int) -> str:
    return next(host.name for host in cluster.hosts if host.node_rank == node_rank)


# Rows.


def _rows(cluster: ClusterFacts) -> Iterable[Row]:
    for label, show in _WORDS.items():
        values = {host.name: show(host) for host in cluster.hosts}
        row = _row_of_words(label, {name: value for name, value in values.items() if value is not None})
        if row is not None:
            yield row
    for label, question, key in _QUANTITIES:
        sizes = {
            host.name: _get(host, question, key)
            for host in cluster.hosts
            if not _get(host, question, "problem")
        }
        row = _row_of_sizes(label, {name: size for name, size in sizes.items() if size is not None})
        if row is not None:
            yield row


def _row_of_words(label: str, values: dict[str, str]) -> Row | None:
    counts = Counter(values.values()).most_common()
    if not counts:
        return None
    has_majority = len(counts) > 1 and counts[0][1] > counts[1][1]
    shown = [
        (value, tuple(name for name, one in values.items() if one == value), has_majority and place > 0)
        for place, (value, _) in enumerate(counts)
    ]
    if len(shown) > NUM_VALUES_SHOWN:
        rest = tuple(name for _, names, _ in shown[NUM_VALUES_SHOWN:] for name in names)
        more = f"{len(shown) - NUM_VALUES_SHOWN} more values"
        shown = [*shown[:NUM_VALUES_SHOWN], (more, rest, has_majority)]
    return Row(label=label, values=tuple(shown))


def _row_of_sizes(label: str, sizes: dict[str, int]) -> Row | None:
    """Sizes differ a little on every host: only from where to where, and who has the least."""
    if not sizes:
        return None
    least, most = min(sizes.values()), max(sizes.values())
    if _bytes(least) == _bytes(most):
        return Row(label=label, values=((_bytes(least), tuple(sizes), False),))
    smallest = tuple(name for name, size in sizes.items() if _bytes(size) == _bytes(least))
    others = tuple(name for name in sizes if name not in smallest)
    low = min(sizes[name] for name in others)
    rest = _bytes(low) if _bytes(low) == _bytes(most) else f"{_bytes(low)} to {_bytes(most)}"
    is_odd = least < median(sizes.values()) / 2
    return Row(label=label, values=((rest, others, False), (_bytes(least), smallest, is_odd)))


def _hostname(host: HostFacts) -> str | None:
    name = _get(host, "system", "hostname")
    is_same = isinstance(name, str) and name.partition(".")[0] == host.name.partition(".")[0]
    return "as in the hostfile" if is_same else name


def _torch(host: HostFacts) -> str | None:
    found = host.answers.get("torch")
    if found is None:
        return None
    return ", ".join(filter(None, (found["version"], found["platform"]))) or "none"


def _gpus(host: HostFacts) -> str | None:
    found = host.answers.get("gpu")
    if found is None:
        return None
    kinds = Counter(found["names"])
    if sum(kinds.values()) != found["num"]:
        return str(found["num"] or "none")
    return ", ".join(f"{number} x {name}" for name, number in kinds.items()) or "none"


def _clock(host: HostFacts) -> str | None:
    if host.clock_offset_s is None:
        return None
    if abs(host.clock_offset_s) - host.clock_error_s < CLOCK_SAME_S:
        return f"within {CLOCK_SAME_S:g} s of this machine's"
    return f"{host.clock_offset_s:+.1f} s (+- {_ms(host.clock_error_s)})"


def _text_of(question: str, key: str) -> Callable[[HostFacts], str | None]:
    def show(host: HostFacts) -> str | None:
        value = _get(host, question, key)
        return None if value is None else str(value) or "none"

    return show


def _limit_of(key: str, *, in_bytes: bool) -> Callable[[HostFacts], str | None]:
    def show(host: HostFacts) -> str | None:
        value = _get(host, "system", key)
        if value is None:
            return None
        return "unlimited" if value < 0 else _bytes(value) if in_bytes else str(value)

    return show


def _get(host: HostFacts, question: str, key: str) -> Any:
    return host.answers.get(question, {}).get(key)


_WORDS: dict[str, Callable[[HostFacts], str | None]] = {
    "host name": _hostname,
    "Python": _text_of("python", "version"),
    "PyTorch": _torch,
    "NVIDIA driver": _text_of("gpu", "driver"),
    "GPUs": _gpus,
    "CPUs": _text_of("system", "num_cpus"),
    "machine": _text_of("system", "machine"),
    "kernel": _text_of("system", "kernel"),
    "numactl": _text_of("system", "numactl"),
    "ulimit -l": _limit_of("memlock", in_bytes=True),
    "ulimit -n": _limit_of("nofile", in_bytes=False),
    "clock": _clock,
}
_QUANTITIES = (
    ("memory", "system", "memory_bytes"),
    ("memory free", "system", "memory_free_bytes"),
    ("/dev/shm", "shm", "size_bytes"),
    ("/dev/shm free", "shm", "free_bytes"),
    ("/tmp free", "tmp", "free_bytes"),
    ("folder free", "cwd", "free_bytes"),
)


def _bytes(size: int) -> str:
    """Three digits or so: `503 GiB`, `1.5 GiB`, `64 MiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, place = float(size), 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:.1f} {units[place]}" if place and value < 10 else f"{value:.0f} {units[place]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


# Output.


def as_text(cluster: ClusterFacts, report: Report) -> str:
    """For people, problems first."""
    num_hosts = len(cluster.hosts)
    hosts = f"{num_hosts} host{'' if num_hosts == 1 else 's'}"
    if report.num_usable < num_hosts:
        count = f"{report.num_usable} of {hosts}"
    else:
        count = f"all {hosts}" if num_hosts > 1 else hosts
    lines = [f"{count} can be used (looked at in {cluster.took_s:.1f} s)"]
    for title, is_problem in (("Problems", True), ("Warnings", False)):
        found = [one for one in report.findings if one.is_problem is is_problem]
        if found:
            lines += ["", f"{title}:", *(f"  {folded(one.hosts)}: {one.text}" for one in found)]
    different = [row for row in report.rows if not row.is_same]
    same = [(row.label, row.values[0][0]) for row in report.rows if row.is_same]
    if report.master:
        same.append(("MASTER_ADDR", report.master))
    width = max((len(row.label) for row in report.rows), default=0)
    if different:
        lines += ["", "Different (! marks the odd ones):"]
        value_width = max(len(value) for row in different for value, _, _ in row.values)
        for row in different:
            for place, (value, names, is_odd) in enumerate(row.values):
                label = "" if place else row.label
                mark = "!" if is_odd else " "
                lines.append(f"  {label:{width}} {mark} {value:{value_width}}  {folded(names)}")
    if same:
        title = "The same everywhere:" if num_hosts > 1 else "Found:"
        lines += ["", title, *(f"  {label:{width}}   {value}" for label, value in same)]
    return "\n".join(lines) + "\n"


def as_dict(cluster: ClusterFacts, report: Report) -> dict[str, Any]:
    """For machines."""
    bad = {host for one in report.findings if one.is_problem for host in one.hosts}
    return {
        "exit_code": report.exit_code,
        "took_s": round(cluster.took_s, 3),
        "problems": [
            {"hosts": list(one.hosts), "text": one.text} for one in report.findings if one.is_problem
        ],
        "warnings": [
            {"hosts": list(one.hosts), "text": one.text} for one in report.findings if not one.is_problem
        ],
        "master": {
            "address": report.master_addr,
            "port": cluster.port,
            "port_problem": cluster.listening_problem,
            "candidates": list(cluster.candidates),
        },
        "same": {row.label: row.values[0][0] for row in report.rows if row.is_same},
        "different": {
            row.label: {value: list(names) for value, names, _ in row.values}
            for row in report.rows
            if not row.is_same
        },
        "hosts": [
            {
                "host": host.name,
                "node_rank": host.node_rank,
                "can_be_used": host.name not in bad,
                "slots": host.num_slots,
                "clock_offset_s": host.clock_offset_s,
                "clock_error_s": host.clock_error_s,
                "reach": None
                if host.reach is None
                else dict(zip(cluster.candidates, host.reach, strict=True)),
                "facts": {question: dict(facts) for question, facts in host.answers.items()},
            }
            for host in cluster.hosts
        ],
    }
