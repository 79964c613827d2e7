"""What a machine with one GPU shows in half an hour: is dslaunch right there, and how fast beside its peers?

    python -m tests.gpu first       in four minutes; `works`, `speed`, `scale` take less than ten each

The machine needs torch with CUDA and pytest, and no network: what else is imported comes out of .gpu/, which
`make gpu-bundle` fills where there is a network. With --fake the plan runs in small on the fake CUDA device.
Into --out come results.json and results.md, written anew after each step, and the steps' logs: what is known
when the machine has to be given back is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .plan import PARTS, PLAN, Step

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
LAST_S = 10.0  # for a step that is told to end
FAKE_FACTOR = 4  # the fake device's work is a processor's
SHOWN = 4  # last lines of a step that fails


def main() -> int:
    """Return 0 if all steps of the parts succeed, peers aside."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is given")
    parser.add_argument("--fake", action="store_true", help="in small, on the fake CUDA device of the tests")
    out = Path(os.environ.get("OUT") or "gpu-out")
    parser.add_argument("--out", type=Path, default=out, help="folder for what comes out; OUT, or gpu-out")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]}: give one of {', '.join(PARTS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    with prepared(is_fake=given.fake) as environ:
        machine = describe_machine(environ)
        print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
        results: list[dict[str, Any]] = []
        name = "-".join(given.parts or PARTS)
        for step in (step for part in given.parts or PARTS for step in PLAN if step.part == part):
            results.append(run(step, environ, is_fake=given.fake, out=given.out))
            write(given.out, machine, results, name=name)
    pack_logs(given.out, name=name)
    print((given.out / f"results-{name}.md").read_text(), end="")
    return 0 if all(result["ok"] or result["has_peer"] for result in results) else 1


@contextmanager
def prepared(*, is_fake: bool) -> Iterator[dict[str, str]]:
    """The environment of the steps: the checkout, and the bundle's packages unless they are installed."""
    environ = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8"),
    }
    path = [str(ROOT)]
    if is_fake:
        path.append(str(ROOT / "tests" / "fake_cuda" / "everywhere"))
        environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if BUNDLE.is_dir() and not is_fake:
            path.append(folder)
            install(Path(folder))
        if (BUNDLE / "deepspeed.tgz").exists() and not is_fake:
            with tarfile.open(BUNDLE / "deepspeed.tgz") as packed:
                packed.extractall(Path(folder) / "peers", filter="data")
            environ["PEERS"] = str(Path(folder) / "peers")
        elif (Path(sys.prefix) / "deepspeed").is_dir():
            environ["PEERS"] = str(Path(sys.prefix) / "deepspeed")
        environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        yield environ


def install(folder: Path) -> None:
    """Unpack the bundle's wheels; where dslaunch's is of another Python, build it from the checkout."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = [
        str(one)
        for one in sorted((BUNDLE / "wheels").glob("*.whl"))
        if "-cp" not in one.name or tag in one.name
    ]
    subprocess.run([*pip, "--target", str(folder), *wheels], check=True)
    if not any(Path(one).name.startswith("dslaunch-") for one in wheels):
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run(
            [*pip, "--no-build-isolation", "--target", str(folder), str(ROOT)], check=True, env=environ
        )


def describe_machine(environ: dict[str, str]) -> dict[str, str]:
    """Return its name and the versions that count, or why they cannot be had: steps may go on without."""
    script = (
        "import json, torch, dslaunch, dslaunch.kernels._C\n"
        "gpu = torch.cuda.get_device_properties(0)\n"
        "nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else 'none'\n"
        "print(json.dumps({'GPU': f'{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB',"
        " 'torch': torch.__version__, 'CUDA': str(torch.version.cuda), 'NCCL': str(nccl),"
        " 'dslaunch': dslaunch.__version__}))"
    )
    found = {"dslaunch and the GPU": "cannot be used here"}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        found["why"] = error.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired as error:
        found["why"] = f"they were not imported within {error.timeout:g} s"
    driver = "no nvidia-smi"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(subprocess.TimeoutExpired):
            driver = subprocess.run(
                query, capture_output=True, text=True, check=False, timeout=60
            ).stdout.strip()
    machine = {"machine": platform.node(), "cores": str(os.cpu_count()), "Python": platform.python_version()}
    return {**machine, "driver": driver, **found}


def run(step: Step, environ: dict[str, str], *, is_fake: bool, out: Path) -> dict[str, Any]:
    """Run one step; return what it printed as JSON, how it ended, and how long it took."""
    result: dict[str, Any] = {
        "part": step.part,
        "step": step.name,
        "asks": step.asks,
        "has_peer": step.has_peer,
    }
    if is_fake and step.only_real:
        print(f"{step.part}: {step.name}: left out: {step.only_real}", flush=True)
        return {**result, "ok": True, "left_out": step.only_real, "s": 0.0, "lines": []}
    path = environ["PYTHONPATH"]
    if step.has_peer and "PEERS" in environ:
        path = os.pathsep.join([environ["PEERS"], path])
    argv = [sys.executable, "-m", *step.argv, *(step.small if is_fake else ())]
    log = out / f"{step.part}-{step.name.replace(' ', '-').replace(',', '')}.log"
    limit_s = step.limit_s * (FAKE_FACTOR if is_fake else 1)
    start = time.monotonic()
    with log.open("w") as target:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**environ, **step.environ, "PYTHONPATH": path},
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _end_of(process, limit_s)
    text = log.read_text(errors="replace")
    lines = list(_json_lines(text.splitlines()))
    is_ok = status == 0 and all(line.get("right", True) and "error" not in line for line in lines)
    took = round(time.monotonic() - start, 1)
    print(
        f"{step.part}: {step.name}: {'ok' if is_ok else f'FAILED ({status})'}, {took} s of {limit_s}",
        flush=True,
    )
    if not is_ok:
        print("".join(f"    {line}\n" for line in text.splitlines()[-SHOWN:]), end="", flush=True)
    return {**result, "ok": is_ok, "status": status, "s": took, "lines": lines}


def _end_of(process: subprocess.Popen[bytes], limit_s: float) -> int | str:
    """Return its exit status, or that it took too long. Nothing of its group is left."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LAST_S)
        return f"no end after {limit_s} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def write(out: Path, machine: dict[str, str], results: list[dict[str, Any]], *, name: str) -> None:
    """Write the results as JSON and as a table: each file is there whole, as it was or as it is."""
    _put(out / f"results-{name}.json", json.dumps({"machine": machine, "results": results}, indent=1))
    rows = [f"{key}: {value}  " for key, value in machine.items()]
    rows += ["", "| part | step | asks | result | s |", "|---|---|---|---|---|"]
    for result in results:
        outcome = "ok" if result["ok"] else f"FAILED ({result['status']})"
        if "left_out" in result:
            outcome = f"left out: {result['left_out']}"
        rows.append(f"| {result['part']} | {result['step']} | {result['asks']} | {outcome} | {result['s']} |")
    measured = [line for result in results for line in result["lines"] if "name" in line]
    rows += ["", "| what | figures |", "|---|---|"]
    for line in measured:
        figures = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("name", "lines"))
        rows.append(f"| {line['name']} | {figures} |")
    _put(out / f"results-{name}.md", "\n".join(rows) + "\n")


def _put(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def pack_logs(out: Path, *, name: str) -> None:
    """Put the logs of all steps into one archive."""
    with tarfile.open(out / f"logs-{name}.tgz", "w:gz") as packed:
        for log in sorted(out.glob("*.log")):
            packed.add(log, arcname=log.name)
            log.unlink()


if __name__ == "__main__":
    sys.exit(main())
