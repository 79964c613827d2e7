"""The table of ZeRO stages and the memory that follows from it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dslaunch import ConfigError
from dslaunch.runtime.placement import stage_policy
from dslaunch.runtime.placement.stage_policy import MeshShape, Placement, Policy, policy_for_stage
from tests.runtime.footprint import memory_bytes, optimizer_bytes_per_element

R, S = Placement.REPLICATED, Placement.SHARDED


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(0, R, R, R), (1, R, R, S), (2, R, S, S), (3, S, S, S)],
)
def test_the_table(stage: int, parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    row = policy_for_stage(stage)
    assert row == Policy(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        reshard_after_forward=parameters is S,
    )
    assert row.mesh_shape(8, group_size=None, kept_in=None) == MeshShape(shard_size=8 if stage else 1)


@pytest.mark.parametrize("stage", [-1, 4])
def test_other_stages_do_not_exist(stage: int) -> None:
    with pytest.raises(ValueError, match="one of 0, 1, 2, 3"):
        policy_for_stage(stage)


# The table of the ZeRO paper (arXiv 1910.02054, table 1): GB per rank for 7.5 billion
# parameters with 16-bit Adam.
@pytest.mark.parametrize(
    ("num_ranks", "stage_1", "stage_2", "stage_3"),
    [
        (1, 120, 120, 120),
        (4, 52.5, 41.3, 30),
        (16, 35.6, 21.6, 7.5),
        (64, 31.4, 16.6, 1.88),
        (1024, 30.1, 15.1, 0.12),
    ],
)
def test_memory_is_the_papers(num_ranks: int, stage_1: float, stage_2: float, stage_3: float) -> None:
    def gigabytes(stage: int) -> float:
        k = optimizer_bytes_per_element(num_states=2, param_bytes=2)
        row = policy_for_stage(stage)
        size = {"param_bytes": 2, "grad_bytes": 2, "optimizer_bytes": k, "num_shards": num_ranks}
        return memory_bytes(row, numel=7_500_000_000, **size).total / 1e9

    assert gigabytes(0) == 120
    assert [gigabytes(stage) for stage in (1, 2, 3)] == pytest.approx([stage_1, stage_2, stage_3], rel=0.03)


def test_fp32_parameters_are_their_own_master() -> None:
    assert optimizer_bytes_per_element(num_states=2, param_bytes=4) == 8
    assert optimizer_bytes_per_element(num_states=2, param_bytes=2) == 12
    assert optimizer_bytes_per_element(num_states=0, param_bytes=2) == 4


def test_no_other_file_of_the_runtime_asks_for_a_stage() -> None:
    home = Path(stage_policy.__file__)
    runtime = home.parent.parent
    read_again = runtime / "compat" / "engine" / "deepspeed_config.py"  # by programs for DeepSpeed
    asking = []
    for path in runtime.rglob("*.py"):
        if path in (home, read_again):
            continue
        if {runtime / "config", runtime / "pipeline"} & {*path.parents}:
            continue  # the reader checks what is written in a ds_config; a pipeline has stages of its own
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match | ast.IfExp | ast.If):
                test = (
                    node
                    if isinstance(node, ast.Compare)
                    else getattr(node, "test", getattr(node, "subject", node))
                )
                names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(test)}
                asking += [f"{path.name}:{node.lineno}"] if "stage" in names else []
    assert asking == []


@pytest.mark.parametrize(
    ("stage", "group_size", "kept_in", "expected"),
    [
        (0, 4, None, MeshShape(shard_size=1)),
        (1, 4, None, MeshShape(shard_size=4)),
        (3, 4, None, MeshShape(shard_size=4)),
        (3, None, 2, MeshShape(shard_size=2, states_by_chunk=True)),
        (
            1,
            3,
            None,
            "zero_optimization.mics_shard_size 3 does not divide the 8 ranks; write a number that does",
        ),
        (3, None, 16, "zero_optimization.zero_hpz_partition_size 16 does not divide the 8 ranks"),
        (
            2,
            None,
            4,
            (
                "zero_optimization.zero_hpz_partition_size 4 says how many ranks share parameters, and at "
                "stage 2 every rank has"
            ),
        ),
    ],
)
def test_who_shares_with_whom(
    stage: int, group_size: int | None, kept_in: int | None, expected: MeshShape | str
) -> None:
    row = policy_for_stage(stage)
    if isinstance(expected, MeshShape):
        assert row.mesh_shape(8, group_size=group_size, kept_in=kept_in) == expected
        return
    with pytest.raises(ConfigError) as caught:
        row.mesh_shape(8, group_size=group_size, kept_in=kept_in)
    assert str(caught.value).startswith(expected)
