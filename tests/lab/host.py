"""A host of the lab, and everything that can go wrong with it."""

from __future__ import annotations

import signal
from pathlib import Path

from . import cgroup, folders, network, procfs, ssh
from .machine import Machine
from .place import LabError

SSH_PORT = 22


class Host(Machine):
    """One host. Each fault stays until it is taken back, or until `restore`; each is one method,
    so the list is long.
    """

    def link_down(self) -> None:
        """The cable has no carrier any more; the host notices."""
        self._may_be_cut = True
        network.set_carrier(self._place, self.name, is_up=False)

    def link_up(self) -> None:
        """The cable has carrier again."""
        network.set_carrier(self._place, self.name, is_up=True)

    def unplug(self) -> None:
        """A silent cut: nothing gets through in either direction, carrier stays, no process is told."""
        self._may_be_cut = True
        network.set_plugged(self._place, self.name, is_plugged=False)

    def plug(self) -> None:
        """Take back `unplug`."""
        network.set_plugged(self._place, self.name, is_plugged=True)

    def _add_rule(self, *rule: str) -> None:
        self._may_have_rules = True
        network.add_rule(self._place, self.name, *rule)

    def drop_port(self, port: int) -> None:
        """TCP packets that come in for this port vanish."""
        self._add_rule("INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")

    def refuse_port(self, port: int, *, source: str | None = None) -> None:
        """TCP packets that come in for this port, from anywhere or from one address,
        are answered with a reset.
        """
        sources = ("-s", source) if source else ()
        reject = ("-j", "REJECT", "--reject-with", "tcp-reset")
        self._add_rule("INPUT", "-p", "tcp", *sources, "--dport", str(port), *reject)

    def drop_from(self, address: str) -> None:
        """What comes from this address vanishes; what goes there arrives."""
        self._add_rule("INPUT", "-s", address, "-j", "DROP")

    def slow_down(self, mbit_per_s: float, *, to: Host | None = None) -> None:
        """What it sends, to all or to one host, goes no faster."""
        self._is_slow = True
        address = "0.0.0.0/0" if to is None else f"{to.address}/32"
        network.slow_down(self._place, self.name, to=address, mbit_per_s=mbit_per_s)

    def receive_slowly(self, mbit_per_s: float) -> None:
        """What comes to it, goes no faster."""
        self._receives_slowly = True
        network.slow_down_incoming(self._place, self.name, mbit_per_s=mbit_per_s)

    def end_slowness(self) -> None:
        """It sends and receives as fast as the machine can."""
        if self._is_slow:
            network.end_slowness(self._place, self.name)
        if self._receives_slowly:
            network.end_incoming_slowness(self._place, self.name)
        self._is_slow = self._receives_slowly = False

    def clear(self) -> None:
        """Take back every firewall rule of this host."""
        network.clear_rules(self._place, self.name)
        self._may_have_rules = False

    def freeze(self) -> None:
        """Every process stops where it is; the kernel goes on to acknowledge what it receives."""
        self._cgroups.freeze()

    def thaw(self) -> None:
        """Take back `freeze`."""
        self._cgroups.thaw()

    def limit_cpu(self, num_cores: float) -> None:
        """All processes together get this many cores, e.g. 0.1."""
        quota_us = int(num_cores * cgroup.CPU_PERIOD_US)
        self._cgroups.limit("cpu", "cpu.cfs_quota_us", quota_us, pids=self._all_pids())

    def limit_memory(self, num_bytes: int) -> None:
        """All processes together get this much memory; the kernel kills who takes more."""
        self._cgroups.limit("memory", "memory.limit_in_bytes", num_bytes, pids=self._all_pids())

    def sshd_stop(self) -> None:
        """Its sshd stops: connections are accepted by the kernel, but no banner ever comes."""
        self._signal_sshd(signal.SIGSTOP)

    def sshd_continue(self) -> None:
        """Take back `sshd_stop`."""
        self._signal_sshd(signal.SIGCONT)

    def sshd_kill(self) -> None:
        """Its sshd is killed: new connections are refused, open ones go on."""
        pid = self._signal_sshd(signal.SIGKILL)
        procfs.wait_until(lambda: not procfs.command_line(pid), timeout_s=procfs.DEATH_TIMEOUT_S)
        self._sshd_pid_file().unlink(missing_ok=True)

    def sshd_start(self) -> None:
        """Start its sshd, after `sshd_kill`."""
        self.run(["/usr/sbin/sshd", "-E", "/var/log/sshd.log"], check=True)
        self.wait_for_sshd()

    def new_host_key(self) -> None:
        """Its sshd starts again with another host key, which is in no known_hosts."""
        ssh.make_host_key(self._place, self.name)
        self._restart_sshd()

    def die(self) -> None:
        """Every process is killed; the kernel closes their connections (FIN or RST)
        and answers new ones with RST.
        """
        self.end()

    def poweroff(self) -> None:
        """The host is gone from one moment to the next: no other host hears from it any more."""
        self.unplug()
        self.end()
        network.remove_host(self._place, self.name)

    def boot(self) -> None:
        """Start the host after `die` or `poweroff`: new network stack, cable plugged in,
        folders as they were.
        """
        if self.is_running:
            raise LabError(
                f"{self.name}: is up; only a host that is down can boot; die() or poweroff() it first"
            )
        if self._place.netns_file(self.name).exists():
            network.remove_host(self._place, self.name)
            self._is_slow = self._receives_slowly = False
        network.add_hosts(self._place, {self.name: self._index})
        self.wait_for_start(self.start())

    def restore(self) -> None:
        """As it was made: up, connected, its own addresses only, no fault or limit,
        no process of a job, no file added.

        Commands are run only for what may have changed: this happens to five hosts after each of
        hundreds of tests.
        """
        self._cgroups.thaw()
        self._cgroups.unlimit()
        has_other_key = ssh.restore_host_key(self._place, self.name)
        if self.is_running:
            self.kill_processes()
            listener = self.sshd_pid()
            if has_other_key or listener is None or procfs.state(listener) == "T":
                self._restart_sshd()
        else:
            self.boot()
        if self._may_be_cut:
            network.connect(self._place, self.name)
            self._may_be_cut = False
        if self._may_have_rules:
            self.clear()
        self.end_slowness()
        init = self._init_or_error()
        if network.addresses_and_routes(init) != self._own_network:
            network.reset_addresses(self._place, self.name, self._index)
            self._own_network = network.addresses_and_routes(init)
        folders.empty(self._place, self.name, dev_shm=Path(f"/proc/{self._init_or_error()}/root/dev/shm"))

    def condition(self) -> str:
        """One word or two on how it is: `up`, `down`, `frozen`, `link down`, `unplugged`."""
        if not self.is_running:
            return "down"
        if self._cgroups.is_frozen():
            return "frozen"
        return network.cable_state(self._place, self.name)

    def _restart_sshd(self) -> None:
        if self.sshd_pid() is not None:
            self.sshd_kill()
        self.sshd_start()

    def _signal_sshd(self, signum: int) -> int:
        pid = self.sshd_pid()
        if pid is None:
            raise LabError(
                f"{self.name}: no sshd listens; it must, to be sent a signal; call sshd_start() first"
            )
        self._signal(pid, signum)
        return pid
