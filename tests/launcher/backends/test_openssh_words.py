"""What several versions of ssh say when they cannot connect, and what we make of it."""

from __future__ import annotations

import pytest

from dslaunch.launcher.backends.openssh_words import Dropped, is_of_ssh, where_to_add, why_not
from dslaunch.launcher.errors import EXIT_HOST

FACTS = {
    "hostname": "w0.lab",
    "port": "2222",
    "user": "ada",
    "userknownhostsfile": "/home/ada/known /etc/other",
}
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
The fingerprint for the ED25519 key sent by the remote host is
SHA256:abc/def+ghi.
Host key verification failed.
"""
GSSAPI = "ada@w0.lab: Permission denied (gssapi-keyex,gssapi-with-mic,keyboard-interactive)."


def said_of(said: str, **facts: str) -> str:
    problem = why_not(said, timeout_s=5, facts={**FACTS, **facts})
    assert problem.exit_code == EXIT_HOST
    assert not isinstance(problem, Dropped), "nothing would change at a second attempt"
    assert "\n" not in str(problem)
    return str(problem)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "ssh: Could not resolve hostname w9: Name or service not known",
            "the name w9 is not known; correct the hostfile, DNS or /etc/hosts",
        ),
        (
            "ssh: connect to host w0.lab port 22: Connection refused",
            "w0.lab port 22 refused the connection; is sshd running there, on this port?",
        ),
        (
            "ssh: connect to host w0.lab port 22: Connection timed out",
            "w0.lab port 22 did not answer within 5 s; is the host up and not behind a firewall?",
        ),
        (
            "ssh: connect to host w0.lab port 22: No route to host",
            "cannot reach w0.lab port 22: No route to host",
        ),
        (
            "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 2222 timed out",
            "w0.lab port 2222 accepted the connection but does not speak SSH: silent for 5 s; is sshd "
            "there stopped, or "
            "out of memory?",
        ),
        (
            "kex_exchange_identification: banner line contains invalid characters\n"
            "banner exchange: Connection to 10.0.0.1 port 80: invalid format",
            "it accepted the connection but does not speak SSH: banner exchange: Connection to 10.0.0.1 "
            "port 80: invalid "
            "format; is that port sshd's?",
        ),
        (
            CHANGED,
            "its host key has CHANGED: now ED25519 SHA256:abc/def+ghi; this may be an attack; if the host "
            "was "
            "reinstalled: ssh-keygen -R '[w0.lab]:2222' and add the new key",
        ),
        (
            CHANGED.replace("Host key ver", "Offending RSA key in /home/ada/known hosts:3\nHost key ver"),
            "its host key has CHANGED: now ED25519 SHA256:abc/def+ghi; this may be an attack; if the host "
            "was "
            "reinstalled: ssh-keygen -f '/home/ada/known hosts' -R '[w0.lab]:2222' and add the new key",
        ),
        (
            "No ED25519 host key is known for w0.lab and you have requested strict checking.\n"
            "Host key verification failed.",
            "its host key is not known; if the right host answers there: ssh-keyscan -p 2222 w0.lab >> "
            "/home/ada/known",
        ),
        (
            "Unable to negotiate with 10.0.0.1 port 22: no matching key exchange method found. Their "
            "offer: a,b",
            "10.0.0.1 port 22 and OpenSSH's ssh have no key exchange method in common: it offers a,b; "
            "allow one of these "
            "in the ssh configuration, or another in its sshd_config (KexAlgorithms)",
        ),
        (
            GSSAPI,
            "ada@w0.lab was refused (OpenSSH's ssh; that host takes gssapi-keyex, gssapi-with-mic, "
            "keyboard-interactive); "
            "renew the Kerberos ticket (kinit), or open a connection that is shared, which may ask: ssh "
            "-fNM HOST, with "
            "ControlPath in the ssh configuration; test with: ssh -o BatchMode=yes ada@w0.lab true",
        ),
        (
            "Permission denied (hostbased).",  # as before OpenSSH 7.8
            "ada@w0.lab was refused (OpenSSH's ssh; that host takes hostbased); allow another way there; "
            "test with: "
            "ssh -o BatchMode=yes ada@w0.lab true",
        ),
        (
            "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\nDisconnected "
            "from 10.0.0.1",
            "it refused the login because of too many keys that it does not know; name the right one with "
            "--ssh_identity, or with IdentityFile and IdentitiesOnly in the ssh configuration",
        ),
        (
            "/home/ada/.ssh/config: line 3: Bad configuration option: nonsense\n"
            "/home/ada/.ssh/config: terminating, 1 bad configuration options",
            "OpenSSH's ssh cannot use what it is told: /home/ada/.ssh/config: line 3: Bad configuration "
            "option: nonsense; "
            "correct the ssh configuration",
        ),
        (
            "Bad owner or permissions on /home/ada/.ssh/config",
            "OpenSSH's ssh cannot use what it is told: Bad owner or permissions on /home/ada/.ssh/config; "
            "correct the ssh "
            "configuration",
        ),
        (
            "",
            "no agent started there: the login or the connection ended, and said nothing; a command must "
            "run there: "
            "test with ssh HOST true",
        ),
        (
            "vdollar_percent_expand: unknown key %Q\npercent_dollar_expand: failed\n",
            "OpenSSH's ssh cannot use what it is told: vdollar_percent_expand: unknown key %Q; correct the "
            "ssh configuration",
        ),
        ("first\nthe moon is full\n", "OpenSSH's ssh could not connect: the moon is full"),
    ],
)
def test_a_connection_that_fails_is_told_in_our_words(said: str, words: str) -> None:
    assert said_of(said) == words
    assert said_of(said.replace("\n", "\r\n")).replace("\r", "") == words, "as some versions end their lines"


@pytest.mark.parametrize(
    "said",
    [
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port "
        "22",
        "ssh_exchange_identification: read: Connection reset by peer",
        "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.1 port 22",
        "Connection closed by UNKNOWN port 65535",
        "banner exchange: Connection to UNKNOWN port -1: Broken pipe",
    ],
)
def test_a_login_that_sshd_dropped_may_be_tried_again(said: str) -> None:
    problem = why_not(said, timeout_s=5, facts=FACTS)
    assert isinstance(problem, Dropped)
    assert str(problem).startswith("the connection ended during the login: ")


def test_a_way_that_ended_is_named_with_its_last_words() -> None:
    said = "nc: no way\nkex_exchange_identification: Connection closed by remote host\n"
    assert said_of(said, proxycommand="nc %h %p") == (
        "ProxyCommand 'nc %h %p' ended: nc: no way; correct it in the ssh configuration, or repair the way "
        "that it goes"
    )
    assert said_of(f"channel 0: open failed: refused\n{said}", proxyjump="w9").startswith(
        "ProxyJump 'w9' ended: nc: "
    )


@pytest.mark.parametrize("said", ["", "kex_exchange_identification: Connection closed by remote host"])
def test_a_way_that_may_have_ended_without_a_word_is_named_and_tried_again(said: str) -> None:
    """ssh's own write may fail first, and then it says nothing at all."""
    problem = why_not(said, timeout_s=5, facts={**FACTS, "proxycommand": "false"})
    assert isinstance(problem, Dropped)
    assert str(problem) == (
        "ProxyCommand 'false' ended, or what it leads to ended the connection, and neither said why; correct "
        "it in the ssh configuration, or repair the way that it goes"
    )


@pytest.mark.parametrize(
    ("line", "is_ssh"),
    [
        ("Connection to w0 closed by remote host.", True),
        ("client_loop: send disconnect: Broken pipe", True),
        ("Timeout, server w0 not responding.", True),
        ("it was killed by SIGKILL", False),
        ("Traceback (most recent call last):", False),
    ],
)
def test_what_ssh_says_at_the_end_is_not_what_the_host_said(line: str, is_ssh: bool) -> None:
    assert is_of_ssh(line) == is_ssh


@pytest.mark.parametrize("file", ["/dev/null", "none"])
def test_no_key_is_added_to_a_file_that_keeps_none(file: str) -> None:
    said = said_of(
        "No ED25519 host key is known for w0.lab.\nHost key verification failed.", userknownhostsfile=file
    )
    scan = "ssh-keyscan -p 2222 w0.lab"
    assert said.endswith(f": {where_to_add(scan, file)}")
    assert said.endswith(
        f"{scan} >> ~/.ssh/known_hosts, and take UserKnownHostsFile={file} out, which keeps no keys"
    )
