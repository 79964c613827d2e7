"""What test_trainer.py has trainer_worker.py run: each case once on plain torch (stage None) and on
dslaunch at some stages.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_STEPS = 6
WANTED = "cases.json"  # in the folder of a job: the names of the cases that are to be run
SAVED_STEP = 4  # the step whose checkpoint a second run resumes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of Trainer. Without `ds_optimizer` it is TrainingArguments that says what optimizer
    there is, and so on.
    """

    stage: int | None
    bf16: bool = False
    fp16: bool = False  # compared with float32
    ds_optimizer: bool = True
    ds_scheduler: bool = True
    offload: tuple[str, ...] = ()  # what lies in host memory: "optimizer", "param"
    is_loaded: bool = False  # the model comes from from_pretrained(), at stage 3 inside zero.Init
    is_resumed: bool = False  # a second run goes on from a checkpoint of the first
    # Blocks are computed again, by this kind of torch's checkpoint; their inputs wait in host memory.
    reentrant: bool | None = None
    tp: int = 1  # layers are divided over so many ranks, where there are as many

    @property
    def name(self) -> str:
        words = ["plain" if self.stage is None else f"stage{self.stage}"]
        words += ["bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"]
        words += [f"{'ds' if self.ds_optimizer else 'hf'}-optimizer"]
        words += [f"{'ds' if self.ds_scheduler else 'hf'}-scheduler"]
        words += [f"offload-{what}" for what in self.offload] + ["loaded"] * self.is_loaded
        words += ["reentrant" if self.reentrant else "recomputed"] * (self.reentrant is not None)
        words += [f"tp{self.tp}"] * (self.tp > 1)
        return "-".join(words)

    @property
    def reference(self) -> Case:
        """The same training on plain torch."""
        return Case(
            stage=None, bf16=self.bf16, ds_optimizer=self.ds_optimizer, ds_scheduler=self.ds_scheduler
        )

    @property
    def is_file(self) -> bool:
        """Whether Trainer gets the ds_config as a file, and not as a dict."""
        return self.stage in (1, 3)


CASES: tuple[Case, ...] = (
    *(Case(stage=stage, is_resumed=True) for stage in (0, 1, 2, 3)),
    *(Case(stage=stage, bf16=True) for stage in (0, 1, 2, 3)),
    *(Case(stage=stage, fp16=True, is_resumed=stage == 3) for stage in (1, 3)),
    *(
        Case(stage=stage, ds_optimizer=False, ds_scheduler=False, is_resumed=stage == 2)
        for stage in (0, 1, 2, 3)
    ),
    *(
        Case(stage=stage, bf16=True, ds_optimizer=False, ds_scheduler=False, is_resumed=stage == 3)
        for stage in (2, 3)
    ),
    *(Case(stage=stage, ds_scheduler=False, is_resumed=stage == 3) for stage in (1, 3)),
    *(Case(stage=stage, ds_optimizer=False, is_resumed=stage == 2) for stage in (2, 3)),
    *(Case(stage=stage, bf16=True, offload=("optimizer",), is_resumed=stage == 2) for stage in (1, 2)),
    *(
        Case(
            stage=stage, ds_optimizer=False, ds_scheduler=False, offload=("optimizer",), is_resumed=stage == 3
        )
        for stage in (2, 3)
    ),
    Case(stage=3, bf16=True, offload=("optimizer", "param"), is_resumed=True),
    *(Case(stage=3, bf16=bf16, is_loaded=True) for bf16 in (False, True)),
    *(Case(stage=stage, reentrant=reentrant) for stage in (2, 3) for reentrant in (True, False)),
    *(Case(stage=stage, tp=2, is_resumed=True) for stage in (1, 3)),
    Case(stage=2, bf16=True, tp=2),
)
FEW = (  # one of each kind: the cases of `make test`
    "stage3-fp16-ds-optimizer-ds-scheduler",
    "stage2-fp32-hf-optimizer-ds-scheduler",
    "stage3-fp32-hf-optimizer-hf-scheduler-offload-optimizer",
    "stage3-bf16-ds-optimizer-ds-scheduler-offload-optimizer-offload-param",
    "stage3-bf16-ds-optimizer-ds-scheduler-loaded",
    "stage3-fp32-ds-optimizer-ds-scheduler-recomputed",
    "stage1-fp32-ds-optimizer-ds-scheduler-tp2",
)


def with_references(cases: list[Case]) -> list[Case]:
    """Return the references that these cases need, each once, and the cases."""
    return [*dict.fromkeys(case.reference for case in cases), *cases]
