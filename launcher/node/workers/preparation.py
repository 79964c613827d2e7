"""Can the job start on this host?

Checked on every host before anything starts on any.
"""

from __future__ import annotations

import _socket  # socket is made of it, and takes 10 ms more
import errno
import os
import stat
import sys

from ....shared import variables
from ...wire.frames import bytes_of, text_of
from ...wire.job import TOKEN_VARIABLE
from ..observe.devices import count_hidden
from ..system.kernel_file import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.job import NodeJob
    from ..observe.core_binding import Core

VENV_PART = 0.25  # part of --prepare_timeout that the shell has for --venv_script
MAX_CLAIMS = 100
_VENV_VARIABLE = b"DSLAUNCH_VENV_SCRIPT"  # holds the script's name, so that it needs no quoting
_SOURCE_AND_PRINT = (
    '[ -r "$DSLAUNCH_VENV_SCRIPT" ] || { echo no such file >&2; exit 1; }; '
    '. "$DSLAUNCH_VENV_SCRIPT" >/dev/null; set -- "$?"; trap - EXIT; cat /proc/self/environ; exit "$1"'
)


class Unprepared(Exception):
    """The job cannot run on this host; the message names what is missing and what to do."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Prepared:
    """Environment, interpreter and notes, the same for all workers of this host."""

    def __init__(
        self, job: NodeJob, *, num_devices: int, says: Callable[[str], object] = lambda step: None
    ) -> None:
        """Report each step to `says` before it begins: a file system that hangs may keep it for ever."""
        self.notes: list[str] = []
        self.env = _inherited_environment()
        says(f"entering the folder {job.cwd}")
        _enter_folder(self._in_home(job.cwd))
        self.python = job.python and self._in_home(job.python)
        if job.python == "":
            self.python = sys.executable
            self.notes.append(f"ranks run with {self.python}, Python {sys.version.split()[0]}")
        if job.venv_script:
            says(f"sourcing --venv_script={job.venv_script}")
            self._enter_venv(job.venv_script, keeps_python=job.keeps_python, limit_s=job.prepare_timeout_s)
        says(f"looking for {' and '.join(filter(None, (self.python, job.script))) or 'nothing'}")
        _check_program(self.python, job.script)
        says("reading what this host has: cores, devices, ports")
        apply_environment(self.env, job.environment)
        self.cores: list[list[int]] = []  # by local rank; empty if no rank is bound
        if job.bind_cores is not None:
            self._bind(job.bind_cores, job.devices, has_gpus=num_devices > 0)
        self._devices: list[str] = []  # by local rank, where there are GPUs
        is_chosen = any(entry[0] == "CUDA_VISIBLE_DEVICES" for entry in job.environment)
        self._choose_devices(job.devices, num_devices, is_chosen=is_chosen, is_server=job.is_server)
        self._port_claim: PortClaim | None = None
        if job.master_port is not None:
            self._choose_port(job.master_port, is_fixed=job.is_port_fixed)

    def own_devices(self, env: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the variables of one rank that differ from the host's, by its LOCAL_RANK. CUDA shows a
        process only the first of several MIG devices, so each rank is shown its own.
        """
        if not any(one.startswith("MIG-") for one in self._devices) or b"LOCAL_RANK" not in env:
            return {}
        return {b"CUDA_VISIBLE_DEVICES": self._devices[int(env[b"LOCAL_RANK"])].encode()}

    def _in_home(self, path: str) -> str:
        """Replace `~/` in front of a path of the hostfile by the home on this host."""
        home = self.env.get(b"HOME")
        return text_of(os.path.join(home, bytes_of(path[2:]))) if path.startswith("~/") and home else path

    def _enter_venv(self, script: str, *, keeps_python: bool, limit_s: float) -> None:
        before = find_program(b"python", self.env)
        self.env = _sourced(script, self.env, timeout_s=VENV_PART * limit_s)
        after = find_program(b"python", self.env)
        if self.python and after and after != before and not keeps_python:
            self.python = text_of(after)

    def _bind(self, asked: list[int], devices: list[str], *, has_gpus: bool) -> None:
        from ..observe.core_binding import format_ranges, read_cores, share_cores

        num_ranks = len(devices)
        if b"KMP_AFFINITY" in self.env:
            raise Unprepared(
                "--bind_cores_to_rank, but KMP_AFFINITY is set and binds threads by itself; unset it",
                exit_code=2,
            )
        allowed = os.sched_getaffinity(0)
        shown = format_ranges(sorted(allowed))
        missing = sorted(set(asked) - allowed)
        if missing:
            raise Unprepared(
                f"--bind_core_list: core {format_ranges(missing)} cannot be used here; allowed are {shown}",
                exit_code=3,
            )
        cores, uses_all = read_cores(set(asked) or allowed), bool(asked)
        where = ""
        if has_gpus:
            self.cores, where = self._cores_near(devices, cores, uses_all=uses_all)
        self.cores = self.cores or share_cores(cores, num_ranks, uses_all=uses_all)
        if not self.cores:
            given = f"--bind_core_list={format_ranges(asked)}" if asked else f"cores {shown}"
            raise Unprepared(
                f"--bind_cores_to_rank: {num_ranks} ranks cannot share {given}; use fewer "
                "slots here, or more cores",
                exit_code=3,
            )
        num_cores = len(self.cores[0])
        self.env[b"OMP_NUM_THREADS"] = str(num_cores).encode()
        self.notes.append(
            f"each rank is bound to {num_cores} core{'s' if num_cores > 1 else ''}{where}: "
            + ", ".join(format_ranges(sorted(share)) for share in self.cores)
        )

    def _cores_near(
        self, devices: list[str], cores: list[Core], *, uses_all: bool
    ) -> tuple[list[list[int]], str]:
        """Return the cores near each rank's GPU, or no cores, and the clause for the note."""
        from ..observe.core_binding import share_near
        from ..observe.gpu_cores import cores_near

        try:
            is_by_bus = self.env.get(b"CUDA_DEVICE_ORDER") == b"PCI_BUS_ID"
            shares = share_near(cores, cores_near(devices, is_by_bus=is_by_bus), uses_all=uses_all)
            why_not = "" if shares else "too few cores are near the GPUs to give each rank its own"
        except (LookupError, ValueError) as error:
            shares, why_not = [], str(error)
        return shares, f", wherever its GPU is ({why_not})" if why_not else " near its GPU"

    def _choose_devices(
        self, devices: list[str], num_devices: int, *, is_chosen: bool, is_server: bool
    ) -> None:
        """`is_chosen`: an environment file or the hostfile sets CUDA_VISIBLE_DEVICES too. A server sees all
        the devices.
        """
        if not devices:  # no ranks share the host: one command may see all of it
            return
        if num_devices:
            beyond = [one for one in devices if one.isdigit() and int(one) >= num_devices]
            if beyond:
                raise Unprepared(
                    f"slot {', '.join(beyond)} is asked for, but there are {num_devices} GPUs here "
                    f"(0-{num_devices - 1}); correct slots= in the hostfile, or use --include",
                    exit_code=3,
                )
            chosen = ",".join(devices).encode()
            if is_chosen and self.env.get(b"CUDA_VISIBLE_DEVICES") != chosen:
                given = text_of(self.env.get(b"CUDA_VISIBLE_DEVICES", b""))
                who = "the server gets" if is_server else "ranks get"
                self.notes.append(
                    f"CUDA_VISIBLE_DEVICES={given} of a file is not used: {who} {text_of(chosen)} here; "
                    "choose with --include, or with devices= in the hostfile"
                )
            self.env[b"CUDA_VISIBLE_DEVICES"] = chosen
            self.env.setdefault(variables.CONNECTIONS.encode(), variables.MAX_CONNECTIONS.encode())
            self._devices = devices
            return
        named = [one for one in devices if not one.isdigit()]
        if named:
            raise Unprepared(
                f"device {', '.join(named)} is asked for, but there is no GPU here; correct "
                "devices= in the hostfile",
                exit_code=3,
            )
        if is_server:  # it may use every core, and needs no GPU
            return
        self.notes.append(f"no GPU here: {len(devices)} CPU worker{'s' if len(devices) != 1 else ''}")
        if b"OMP_NUM_THREADS" not in self.env and len(devices) > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // len(devices))
            self.env[b"OMP_NUM_THREADS"] = str(threads).encode()
            self.notes[-1] += f", OMP_NUM_THREADS={threads} for each"
        hidden = count_hidden()
        if hidden:
            self.notes[-1] += (
                f"; the driver has {hidden}, so a container has to be given them: docker run --gpus all, "
                "apptainer exec --nv"
            )

    def _choose_port(self, wanted: int, *, is_fixed: bool) -> None:
        try:
            self._port_claim = PortClaim(wanted)
        except OSError as error:
            is_busy = error.errno == errno.EADDRINUSE
            why = "is in use here" if is_busy else f"cannot be used here: {os.strerror(error.errno or 0)}"
            if is_fixed:
                hint = ", or leave the option out if you gave it" if is_busy else ""
                raise Unprepared(f"--master_port={wanted} {why}; choose another{hint}", exit_code=2) from None
            self._port_claim = _claim_any()
            self.notes.append(f"port {wanted} {why}, so MASTER_PORT={self.master_port}")

    @property
    def master_port(self) -> int:
        """Port that rank 0 will listen on; 0 on every node but the first."""
        return self._port_claim.port if self._port_claim else 0


def apply_environment(env: dict[bytes, bytes], entries: list[list[str]]) -> None:
    """Set each variable in order. An entry: its name, then by turns literal text and a variable's name."""
    for name, *parts in entries:
        pieces = [
            env.get(bytes_of(part), b"") if place % 2 else bytes_of(part) for place, part in enumerate(parts)
        ]
        env[bytes_of(name)] = b"".join(pieces)


def find_program(name: bytes, env: dict[bytes, bytes]) -> bytes | None:
    """Return the file that `name` means with this PATH, or None."""
    folders = [b""] if b"/" in name else env.get(b"PATH", os.defpath.encode()).split(b":")
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _enter_folder(cwd: str) -> None:
    try:
        os.chdir(bytes_of(cwd))
    except OSError as error:
        raise Unprepared(
            f"cannot use the folder {cwd}: {os.strerror(error.errno or 0)}; "
            "start from a folder that every host has at that path, bring it there with --sync, or say "
            "cwd= in the hostfile",
            exit_code=3,
        ) from None


def _check_program(python: str | None, script: str | None) -> None:
    if python is not None and find_program(bytes_of(python), {}) is None:
        raise Unprepared(
            f"no Python at {python}; every host needs the same path to it, or use --venv_script, or say "
            "python= in the hostfile",
            exit_code=3,
        )
    why_not = "" if script is None else why_no_script(script)
    if why_not:
        raise Unprepared(why_not, exit_code=2)


def why_no_script(script: str) -> str:
    """Return why Python cannot run the script; empty if it can, as far as that can be told."""
    path = bytes_of(script)
    if not os.path.exists(path):
        return f"no script {script}" + ("" if os.path.isabs(path) else f" in {os.getcwd()}")
    if os.path.isdir(path):
        has_main = any(os.path.exists(os.path.join(path, name)) for name in (b"__main__.py", b"__main__.pyc"))
        why = f"{script} is a folder without a __main__.py; give a script, or a package with --module"
        return "" if has_main else why
    if not os.access(path, os.R_OK, effective_ids=True):
        return f"the script {script} may not be read by user {os.geteuid()} here; let it be read: chmod +r"
    return ""


def _inherited_environment() -> dict[bytes, bytes]:
    """Return the environment of this process's start, without the job's secret. Not os.environ: Python may
    have changed LC_CTYPE there.
    """
    with open("/proc/self/environ", "rb") as file:
        found = _parse_environ(file.read())
    found.pop(TOKEN_VARIABLE.encode(), None)
    return found


def _parse_environ(data: bytes) -> dict[bytes, bytes]:
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def _sourced(script: str, env: dict[bytes, bytes], *, timeout_s: float) -> dict[bytes, bytes]:
    """Return the environment after sourcing the script.

    A last command that fails in silence, as `[ -d x ] && ...` may, is no fault of the script. With text on
    stderr it is a fault: a syntax error, a folder, a module that cannot be loaded.
    """
    import subprocess
    import tempfile

    shell = find_program(b"bash", env) or b"/bin/sh"
    said = f"--venv_script={script}"
    path = _path_of(bytes_of(script), env)
    if _is_without_end(path):
        raise Unprepared(
            f"{said} is a pipe or a device, whose end may never come; name a shell script", exit_code=3
        )
    with tempfile.TemporaryFile() as errors:  # not a pipe: a process that the script leaves may keep it open
        try:
            result = subprocess.run(
                [shell, b"-c", _SOURCE_AND_PRINT.encode()],
                env={**env, _VENV_VARIABLE: path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout_s:g} s, a quarter of --prepare_timeout"
            raise Unprepared(f"{said} {why}", exit_code=3) from None
        errors.seek(0)
        lines = text_of(errors.read()).strip().splitlines()
    if result.returncode != 0 and (lines or not result.stdout):
        why = lines[-1] if lines else "it wrote nothing to stderr"
        raise Unprepared(f"{said} ended with {result.returncode}: {why}", exit_code=3)
    if not result.stdout:
        raise Unprepared(
            f"{said} called exit, so what it set is lost; let it end with its last line", exit_code=3
        )
    sourced = _parse_environ(result.stdout)
    sourced.pop(_VENV_VARIABLE, None)
    return sourced


def _is_without_end(path: bytes) -> bool:
    """Tell whether reading the path would never end. A missing path or a folder is for the shell to name."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or os.path.samefile(path, os.devnull))


def _path_of(script: bytes, env: dict[bytes, bytes]) -> bytes:
    """Make the path absolute: a shell's `.` looks for a plain name in PATH first. `~` is the home here."""
    if script.startswith(b"~/") and b"HOME" in env:
        return os.path.join(env[b"HOME"], script[2:])
    return os.path.join(os.getcwdb(), script)


class PortClaim:
    """A port without a listener that was promised to no other job on this host, for as long as this object
    lives.

    Rank 0 listens only seconds later, when it has imported torch. Until then other agents here, of any user,
    see the claim: a name in the abstract socket namespace, which vanishes with the process.
    """

    def __init__(self, port: int) -> None:
        """Claim the port; 0 means any. Errors: OSError, EADDRINUSE if the port is taken."""
        from ..system.listener import listen_on_all

        self.port = port
        self._mark = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        if port:  # before the bind, which would be in the way of the job that it was promised to
            self._mark_as_ours()
        server = listen_on_all(port)
        self.port = server.getsockname()[1]
        server.close()
        if not port:
            self._mark_as_ours()

    def _mark_as_ours(self) -> None:
        self._mark.bind(b"\0dslaunch master port %d" % self.port)

    def __del__(self) -> None:
        if hasattr(self, "_mark"):
            self._mark.close()


def _claim_any() -> PortClaim:
    """Claim a free port. Errors: Unprepared if there is none"""
    why = ""
    for _ in range(MAX_CLAIMS):  # the kernel's choice may be promised to another job
        try:
            return PortClaim(0)
        except OSError as error:
            why = os.strerror(error.errno or 0)
    raise Unprepared(
        f"no port is free here for MASTER_PORT ({why}, tried {MAX_CLAIMS} times; the kernel gives those of "
        f"net.ipv4.ip_local_port_range, {_port_range()}); end what holds them, or give --master_port",
        exit_code=3,
    )


def _port_range() -> str:
    words = read_text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return " to ".join(words) or "which cannot be read here"
