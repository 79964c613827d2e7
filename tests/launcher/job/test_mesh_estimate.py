"""What --mesh_estimate says of a model, by hand; tests/runtime/mesh compares it with what is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.job.mesh import JobMesh
from dslaunch.launcher.job.mesh_estimate import Estimate, estimate_of
from dslaunch.launcher.options.mesh import EstimateOptions

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SEQ = 16


def estimate(folder: Path, **given: int) -> Estimate:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = estimate_of(EstimateOptions(**{"model": str(folder), "seq": SEQ, "bytes": 4, **given}))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_numbers_are_those_of_the_formulas(tmp_path: Path) -> None:
    block = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    dense = 4 * block + 2 * 32 * 64
    one = estimate(tmp_path, micro_batches=8, micro_batch=2, stage=1)
    assert one.sizes.dense == dense
    mesh = JobMesh(pp=2, dp=2, sp=2, tp=2)
    width = 4 * 2 * SEQ / 2  # bytes of a micro batch's part for each element
    assert one.sent_bytes(mesh, "tp") == 8 * 2 * 8 * 0.5 * width * 64
    assert one.sent_bytes(mesh, "sp") == 8 * 2 * 2 * 0.5 * width * (64 + 2 * 32)
    assert one.sent_bytes(mesh, "pp") == 2 * 8 * width * 64
    assert one.sent_bytes(mesh, "dp") == 2 * 0.75 * dense / 4 * 4
    assert one.held_bytes(mesh) == dense / 4 * (4 + 4 + 8 / 4)
    assert one.sent_bytes(JobMesh(dp=1), "dp") == 0
    assert "a rank holds 370 KiB" in one.describe(mesh)


def test_experts_are_shared_by_fewer_ranks(tmp_path: Path) -> None:
    moe = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(moe))
    one = estimate_of(EstimateOptions(str(tmp_path / "config.json"), seq=SEQ, stage=3))
    assert one is not None
    experts = 4 * 8 * 3 * 64 * 128
    dense = 4 * (64 * 64 * 2 + 2 * 64 * 32) + 2 * 32 * 64
    assert one.sizes.experts == experts
    mesh = JobMesh(dp=4, ep=2)
    assert one.sent_bytes(mesh, "ep") == 4 * 4 * 0.5 * 2 * SEQ * 64 * 2
    assert one.sent_bytes(mesh, "dp") == pytest.approx(3 * 2 * (0.75 * dense + 0.5 * experts / 2))
    assert one.held_bytes(mesh) == pytest.approx((2 + 4 + 12) * (dense / 4 + experts / 2 / 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "hidden_size is not there; the estimate needs a config.json of transformers"),
        ('{"hidden_size": "x"}', "hidden_size is 'x'"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_says_nothing_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=r"--mesh_estimate") as raised:
        estimate_of(EstimateOptions(str(path), seq=8))
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
