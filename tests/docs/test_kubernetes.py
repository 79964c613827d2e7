"""The manifest of the guide says one thing in several places; they agree, and dslaunch takes the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.inputs.hostfile import parse_hostfile
from dslaunch.launcher.options import Options
from dslaunch.launcher.rendezvous.node_rank import find_node_rank
from dslaunch.launcher.run import host_pool, make_plan, run_job

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "launch" / "kubernetes.md"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The documents of the manifest, by kind."""
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.fixture
def options(manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Options:
    """What the container's command means."""
    container = container_of(manifest)
    words = [str(word) for word in [*container["command"], *container["args"]]]
    assert words.pop(0) == "dslaunch"
    taken: list[Options] = []
    monkeypatch.setattr(run_job, "run", lambda options: taken.append(options) or 0)
    with pytest.raises(SystemExit):
        cli.main(words)
    return taken[0]


def container_of(manifest: dict[str, Any]) -> Any:
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    return container


def test_the_command_is_one_of_dslaunch(manifest: dict[str, Any], options: Options) -> None:
    pod = manifest["Job"]["spec"]["template"]["spec"]
    assert options.rendezvous.no_ssh
    assert (options.program, options.arguments[0]) == ("train.py", "--deepspeed")
    assert options.kill_grace_s < pod["terminationGracePeriodSeconds"]
    assert options.hostfile is None
    assert container_of(manifest)["volumeMounts"][0]["mountPath"] == str(host_pool.DEFAULT_HOSTFILE.parent)


def test_there_is_a_line_of_the_hostfile_for_each_pod_and_a_gpu_for_each_slot(
    manifest: dict[str, Any],
) -> None:
    job = manifest["Job"]["spec"]
    hosts = parse_hostfile(manifest["ConfigMap"]["data"][host_pool.DEFAULT_HOSTFILE.name], source="manifest")
    names = [host.name for host in hosts]
    assert names == [f"{manifest['Job']['metadata']['name']}-{place}" for place in range(job["completions"])]
    assert job["completions"] == job["parallelism"]
    assert {host.slots for host in hosts} == {container_of(manifest)["resources"]["limits"]["nvidia.com/gpu"]}
    for place in range(len(names)):
        environ = {"JOB_COMPLETION_INDEX": str(place)}
        found = find_node_rank(None, selected=names, pool=names, environ=environ, own_names=["pod"])
        assert found == place


def test_node_0_is_found_by_its_name_and_its_ports_are_open(
    manifest: dict[str, Any], options: Options
) -> None:
    service = manifest["Service"]
    job_name = manifest["Job"]["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job_name}
    assert manifest["Job"]["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert options.master_addr == f"{job_name}-0.{service['metadata']['name']}"
    ports = [one["containerPort"] for one in container_of(manifest)["ports"]]
    assert ports == [make_plan.DEFAULT_PORT, make_plan.DEFAULT_PORT + 1]
