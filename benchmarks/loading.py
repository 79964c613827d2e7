"""Loading a folder of weights: a part for each rank, beside transformers' from_pretrained().

    python benchmarks/loading.py [GB]

makes a folder of a Llama with random values, of 4 GB by default, and says what each tool takes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import table
from benchmarks.loading_worker import EACH_RANK, ONE_PROCESS, OURS, Loaded
from benchmarks.team import Team

WORKER = str(Path(__file__).with_name("loading_worker.py"))
NUM_RANKS = 4
SHARD_MB = 500
_LAYER_BYTES = 4 * (4 * 1536**2 + 3 * 1536 * 4608)  # float32
_RANKS = {ONE_PROCESS: 1, EACH_RANK: NUM_RANKS, OURS: NUM_RANKS}


def make_folder(folder: Path, *, gigabytes: float) -> int:
    """Write weights of about this size into a folder, in files of 500 MB; return their bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4608,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / _LAYER_BYTES)),
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=f"{SHARD_MB}MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def loading(
    folder: Path, *, rounds: int = 1, tools: Iterable[str] = (ONE_PROCESS, EACH_RANK, OURS)
) -> dict[str, list[Loaded]]:
    """Return what each tool takes for a folder that `make_folder` wrote: for each round, that of the rank
    which takes most. Every round has processes of its own, and the tools take turns.
    """
    found: dict[str, list[Loaded]] = {}
    with tempfile.TemporaryDirectory() as said:
        for number in range(rounds):
            for tool in tools:
                team = Team(tool, [WORKER, tool, str(folder)], _RANKS[tool], Path(said) / str(number))
                try:
                    team.ask("")  # ready
                    ranks = [Loaded(*json.loads(answer)) for answer in team.ask("")]
                finally:
                    team.end()
                found.setdefault(tool, []).append(Loaded(*map(max, zip(*ranks, strict=True))))
    return found


def rows(found: dict[str, list[Loaded]], num_bytes: int) -> list[list[str]]:
    """Return a table's rows: tool, ranks, the quickest round's seconds, and the largest memory of a rank."""
    parts = {tool: num_bytes / 1e6 / _RANKS[tool] for tool in found}
    return [
        [
            tool,
            str(_RANKS[tool]),
            f"{min(one.seconds for one in rounds):.1f}",
            f"{max(one.peak_mb for one in rounds):.0f}",
            f"{parts[tool]:.0f}",
        ]
        for tool, rounds in found.items()
    ]


def _main(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = make_folder(Path(folder), gigabytes=gigabytes)
        print(f"{num_bytes / 1e9:.1f} GB in files of {SHARD_MB} MB")
        head = ["tool", "ranks", "seconds", "memory of a rank at its peak, MB", "its part, MB"]
        print(table(head, rows(loading(Path(folder)), num_bytes)))


if __name__ == "__main__":
    _main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
