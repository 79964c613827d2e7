"""Planted faults: does a test go red for a small change of the code?

    python -m tests.mutations --seed 39 --count 120 --results FILE.jsonl
    python -m tests.mutations --again FILE.jsonl --results LATER.jsonl
    python -m tests.mutations --table FILE.jsonl [LATER.jsonl]

The first form chooses places by chance, as many in each folder whatever its length, changes one after the
other, and runs the tests near each. The second makes the same changes again, in a tree whose code and tests
may have moved; with a second file the table ends with those whose tests were red and are no longer. A change
that is in the file of results is left out, so an interrupted run goes on where it was. It wants a tree
without changes of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutation_sites import Mutation, Site, find, sites
from tests.mutation_tests import Judge

ROOT = Path(__file__).parents[1]
DETECTED = ("red", "timeout")


def choose(all_sites: list[Site], *, seed: int, count: int) -> list[Mutation]:
    """Return mutations in an order by chance, spread over the folders and, in each, over the operators."""
    chance = random.Random(seed)
    folders: dict[str, dict[str, list[Site]]] = {}
    for site in all_sites:
        folder = folders.setdefault(str(Path(site.mutation.file).parent), {})
        folder.setdefault(site.mutation.operator, []).append(site)
    names = sorted(folders)
    quota = dict.fromkeys(names, count // len(names))
    for name in chance.sample(names, count % len(names)):
        quota[name] += 1
    chosen = []
    for name in names:
        by_operator = folders[name]
        for _ in range(quota[name]):
            left = sorted(operator for operator, rest in by_operator.items() if rest)
            if not left:
                break
            rest = by_operator[chance.choice(left)]
            chosen.append(rest.pop(chance.randrange(len(rest))).mutation)
    chance.shuffle(chosen)
    return chosen


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return one dictionary for each line; a run that has not begun has no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: list[dict[str, Any]]) -> str:
    """Return the verdicts counted by folder, then each mutation that no test saw."""
    verdicts = sorted({result["verdict"] for result in results})
    counts = Counter((str(Path(result["file"]).parent), result["verdict"]) for result in results)
    lines = ["  ".join([f"{'folder':34}", *(f"{verdict:>9}" for verdict in verdicts)])]
    for folder in sorted({folder for folder, _ in counts}):
        lines.append("  ".join([f"{folder:34}", *(f"{counts[folder, name]:9}" for name in verdicts)]))
    totals = Counter(result["verdict"] for result in results)
    lines.append("  ".join([f"{'all':34}", *(f"{totals[name]:9}" for name in verdicts)]))
    return "\n".join([*lines, *(told(result) for result in results if result["verdict"] not in DETECTED)])


def told(result: dict[str, Any]) -> str:
    """Return one line about a mutation."""
    statement = result["statement"].replace("\n", " ")
    place = f"{result['file']}:{result['function']}"
    return f"{result['number']}: {result['verdict']}: {place}: {result['operator']} in `{statement}`"


def lost(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Return a line for each mutation that a test saw in `old`, and none in `new`."""
    seen = {result["number"] for result in old if result["verdict"] in DETECTED}
    return [told(result) for result in new if result["number"] in seen and result["verdict"] not in DETECTED]


def run(mutations: list[Mutation], *, only: set[int], results: Path, judge: Judge) -> None:
    """Judge each mutation that `results` lacks, and append a line for it there."""
    earlier = {result["number"] for result in read_results(results)}
    for number, mutation in enumerate(mutations, 1):
        if number in earlier or (only and number not in only):
            continue
        site = find(mutation, ROOT)
        verdict = judge(site) if site else {"verdict": "not found"}
        line = {"number": number, **mutation.as_dict(), **verdict}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{told(line)}: {line.get('test', '')} ({line.get('seconds', 0)} s)", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--only", default="", metavar="N,M", help="the numbers of the mutations to make")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where a line for each is appended")
    parser.add_argument("--again", type=Path, metavar="FILE", help="make the mutations of this file")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="show a file, compare a later one"
    )
    parser.add_argument("--list", action="store_true", help="show what would be changed")
    parser.add_argument("--stage-limit", type=float, default=240.0, metavar="S", help="for a group of tests")
    parser.add_argument("--limit", type=float, default=400.0, metavar="S", help="for the tests of a mutation")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.table:
        files = [read_results(path) for path in arguments.table]
        print(table(files[-1]))
        missed = lost(files[0], files[-1])
        print(
            "\n".join(["red before, and no longer:", *missed]) if missed else "", end="\n" if missed else ""
        )
        return 1 if missed else 0
    before = {}
    if arguments.again:
        again = sorted(read_results(arguments.again), key=lambda result: result["number"])
        mutations = [Mutation.from_dict(result) for result in again]
        before = {
            mutation: result["test"]
            for mutation, result in zip(mutations, again, strict=True)
            if "::" in result.get("test", "")
        }
    else:
        mutations = choose(sites(ROOT), seed=arguments.seed, count=arguments.count)
    if arguments.list:
        for number, mutation in enumerate(mutations, 1):
            print(told({"number": number, "verdict": "-", **mutation.as_dict()}))
        return 0
    if arguments.results is None:
        raise SystemExit("no file for the results was given; name one with --results FILE.jsonl")
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    if changed := subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout:
        raise SystemExit(f"the tree has changes: commit them or take them back first\n{changed}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # the file that is changed is put back by `finally`
        signal.signal(number, lambda *_: sys.exit(1))
    judge = Judge(ROOT, red_before=before, stage_limit_s=arguments.stage_limit, limit_s=arguments.limit)
    numbers = {int(number) for number in arguments.only.split(",") if number}
    run(mutations, only=numbers, results=arguments.results, judge=judge)
    return 0


if __name__ == "__main__":
    sys.exit(main())
