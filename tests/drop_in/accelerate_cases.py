"""What test_accelerate.py has accelerate_worker.py run: each way of giving an optimizer on plain torch
(stage None), and on dslaunch.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_STEPS = 6
WANTED = "cases.json"  # in the folder of a job: the names of the cases that are to be run
SAVED_STEP = 3  # the step after which the states are saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training loop of the program's own.

    `way` is who has the optimizer and the schedule:
    client    torch.optim.AdamW and LambdaLR
    warmup    torch.optim.AdamW, and deepspeed.runtime.lr_schedules.WarmupLR on it
    dummy     the ds_config, by DummyOptim and DummyScheduler
    callable  the ds_config the optimizer, and a callable of DummyScheduler's makes the schedule
    """

    stage: int | None
    way: str = "client"
    bf16: bool = False
    is_offloaded: bool = False
    is_resumed: bool = False  # a second run goes on from the states that the first has saved
    is_launched: bool = False  # Accelerator() without arguments: `accelerate launch` has said it all

    @property
    def name(self) -> str:
        words = [
            "plain" if self.stage is None else f"stage{self.stage}",
            "bf16" if self.bf16 else "fp32",
            self.way,
        ]
        return "-".join([*words, *["offload"] * self.is_offloaded, *["launched"] * self.is_launched])

    @property
    def reference(self) -> Case:
        """The same training on plain torch: who made optimizer and schedule changes no number."""
        way = {"dummy": "warmup", "callable": "client"}.get(self.way, self.way)
        return Case(stage=None, way=way, bf16=self.bf16)


LAUNCHED_STAGE = 3  # of the ds_config that `accelerate launch` gets
CASES: tuple[Case, ...] = (
    *(Case(stage=stage, is_resumed=True) for stage in (0, 1, 2, 3)),
    *(Case(stage=stage, bf16=True, is_resumed=stage == 3) for stage in (1, 2, 3)),
    *(Case(stage=stage, way="dummy", is_resumed=stage == 2) for stage in (0, 1, 2, 3)),
    *(Case(stage=stage, way="dummy", bf16=True) for stage in (2, 3)),
    *(Case(stage=stage, way="callable", is_resumed=stage == 3) for stage in (1, 3)),
    *(Case(stage=stage, way="warmup", is_resumed=stage == 2) for stage in (2, 3)),
    *(Case(stage=stage, is_offloaded=True, is_resumed=stage == 3) for stage in (2, 3)),
    Case(stage=2, way="warmup", is_offloaded=True),
    Case(stage=LAUNCHED_STAGE, way="dummy", is_launched=True, is_resumed=True),
)
FEW = (  # one or two of each kind: the cases of `make test`
    "stage0-fp32-client",
    "stage3-fp32-client",
    "stage2-bf16-client",
    "stage2-fp32-dummy",
    "stage3-bf16-dummy",
    "stage3-fp32-callable",
    "stage2-fp32-warmup",
    "stage3-fp32-client-offload",
    "stage2-fp32-warmup-offload",
    "stage3-fp32-dummy-launched",
)
REFERENCES: tuple[Case, ...] = tuple(dict.fromkeys(case.reference for case in CASES))
