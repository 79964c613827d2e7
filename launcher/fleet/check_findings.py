"""Faults of hosts, as sentences: problems keep a host from being used, warnings do not."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from ..controller.master_search import first_reached, who_fails
from ..inputs.host_list import folded
from ..wording import shown_ms, shown_size
from .check_facts import ClusterFacts, Finding, HostFacts
from .check_gpus import faults_of_gpus
from .check_rows import rows_of

CLOCK_WARNING_S = 1.0
SMALL_BYTES = 1 << 30  # less than this in /dev/shm, /tmp or the job's folder is reported
LITTLE_MEMORY = 0.5  # part of the free memory of most hosts; less is reported
SLOW_LINK = 0.5  # part of the speed of the fastest link of most hosts
FEW_FILES = 1024  # sockets and files that one process may have open
_FREE = {"tmp": "/tmp", "cwd": "the job's folder"}


def findings_of(cluster: ClusterFacts) -> tuple[Finding, ...]:
    """Return all faults: problems first, equal sentences once with all their hosts."""
    return tuple(_merged([*_findings_of_hosts(cluster), *_findings_of_cluster(cluster)]))


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
                f"look at the host, or give it more time with {cluster.timeout_option}",
            )
        for question, why in host.wrong:
            yield _problem(host, f"its answer about {question} cannot be used: {why}")
        yield from _findings_of_software(host, has_torch=has_torch)
        yield from _findings_of_devices(host, has_gpus=has_gpus)
        yield from _findings_of_room(host)
        yield from _findings_of_clock(host)
        for text in host.answers.get("link", {}).get("faults", ()):
            yield _warning(host, f"{text}; look at its cable and at the switch")
    yield from faults_of_gpus(cluster)


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
            "start from a folder that every host has at that path, bring it there with --sync, or say "
            "cwd= in the hostfile",
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
            f"slots={host.num_slots}, but {there}; correct slots= in the hostfile, use --include, or look "
            "for the missing GPU with nvidia-smi",
        )


def _findings_of_room(host: HostFacts) -> Iterable[Finding]:
    shm = host.answers.get("shm")
    if shm is not None and (shm["problem"] or shm["size_bytes"] < SMALL_BYTES):
        why = (
            f"cannot be used: {shm['problem']}"
            if shm["problem"]
            else f"holds {shown_size(shm['size_bytes'])}"
        )
        yield _warning(
            host,
            f"/dev/shm {why}; data loaders and NCCL need 1 GiB or more (docker run: "
            "--shm-size=16g or --ipc=host)",
        )
    for question, name in _FREE.items():
        disk = host.answers.get(question, {"problem": "", "free_bytes": SMALL_BYTES})
        if disk["problem"] and question != "cwd":
            yield _warning(host, f"{name} cannot be used: {disk['problem']}")
        elif not disk["problem"] and disk["free_bytes"] < SMALL_BYTES:
            yield _warning(host, f"{shown_size(disk['free_bytes'])} free in {name}; make room")
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
            f"its clock is {abs(host.clock_offset_s):.1f} s {side} this machine's (+- "
            f"{shown_ms(host.clock_error_s)}); logs and file times will not fit together: let a time service "
            "such as chrony run",
        )


def _findings_of_cluster(cluster: ClusterFacts) -> Iterable[Finding]:
    yield from _differences(cluster)
    yield from _less_than_most(cluster)
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
        problems = cluster.reach
        if first_reached(cluster.candidates, problems) is None:
            for node_rank, text in who_fails(first.name, cluster.port, cluster.candidates, problems):
                yield Finding(hosts=(cluster.name_of(node_rank),), text=text, is_problem=True)
    elif len(cluster.hosts) > 1:
        others = tuple(host.name for host in cluster.hosts[1:] if not host.problem)
        if others:
            text = f"whether they reach node 0 was not tried, because {first.name} cannot be used"
            yield Finding(hosts=others, text=text, is_problem=False)


def _differences(cluster: ClusterFacts) -> Iterable[Finding]:
    """Find versions that must be the same."""
    for row in rows_of(cluster):
        if row.label in ("Python", "PyTorch", "NCCL", "NVIDIA driver") and not row.is_same:
            there = [(value, hosts) for value, hosts, _ in row.values if value != "none"]
            if len(there) > 1:
                shown = "; ".join(f"{value} on {folded(hosts)}" for value, hosts in there)
                odd = tuple(host for _, hosts in there[1:] for host in hosts)
                text = f"{row.label} is not the same everywhere: {shown}; install the same version"
                yield Finding(hosts=odd, text=text, is_problem=False)


def _less_than_most(cluster: ClusterFacts) -> Iterable[Finding]:
    """Find hosts with little free memory or a slow link, where most have more."""
    told = [host for host in cluster.hosts if "system" in host.answers]
    usual = median([host.answers["system"]["memory_free_bytes"] for host in told] or [0])
    for host in told:
        memory = host.answers["system"]
        if memory["memory_free_bytes"] < LITTLE_MEMORY * usual:
            yield _warning(
                host,
                f"{shown_size(memory['memory_free_bytes'])} of its {shown_size(memory['memory_bytes'])} of "
                f"memory are free, where most hosts have {shown_size(int(usual))}; end what uses it (ps aux "
                "--sort=-rss)",
            )
    told = [host for host in cluster.hosts if host.answers.get("link", {}).get("fastest_mbit", -1) > 0]
    usual = median([host.answers["link"]["fastest_mbit"] for host in told] or [0])
    for host in told:
        speed = host.answers["link"]["fastest_mbit"]
        if speed < SLOW_LINK * usual:
            yield _warning(
                host,
                f"its fastest link has {speed / 1000:g} Gbit/s, where most hosts have {usual / 1000:g}; "
                "look at its network card, cable and port",
            )


def _doubles(cluster: ClusterFacts) -> Iterable[Finding]:
    """Find hosts that are one machine under two names."""
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
    """Return equal sentences once, with all their hosts; problems first."""
    hosts_of: dict[tuple[bool, str], list[str]] = {}
    for one in findings:
        hosts_of.setdefault((not one.is_problem, one.text), []).extend(one.hosts)
    merged = [
        Finding(hosts=tuple(hosts), text=text, is_problem=not is_warning)
        for (is_warning, text), hosts in hosts_of.items()
    ]
    return sorted(merged, key=lambda one: not one.is_problem)
