"""The rows of the table of names: what there is of each name of DeepSpeed's, and where.

Only what is cheap to import: all of it is read by `import deepspeed`.
"""

from __future__ import annotations

from typing import NamedTuple


class NameFate:
    """The fate of a name."""

    WORKS = "works"
    MAPPED = "mapped"  # ours in its place, with a difference that the note says
    REFUSED = "refused"


class NameRow(NamedTuple):
    """Some names of one module with the same fate.

    `topic` is a heading of the compatibility page, for those refused.
    """

    fate: str
    names: dict[
        str, str
    ]  # DeepSpeed's -> ours, "module:attribute", or "module" for a whole one; "" if refused
    note: str = ""
    topic: str = ""

    def home_of(self, name: str) -> tuple[str, str]:
        """Return where ours lives: the module, and the attribute in it, "" for the module itself."""
        home, _, attribute = self.names[name].partition(":")
        return home, attribute


class Module(NamedTuple):
    """One module of DeepSpeed's. `why` is set where it is missing, or has no names
    but those of the rows.
    """

    name: str
    rows: tuple[NameRow, ...] = ()
    why: str | None = None
    topic: str = ""

    @property
    def names(self) -> list[str]:
        """Return the names that can be imported."""
        return [name for row in self.rows if row.fate != NameFate.REFUSED for name in row.names]

    def row_of(self, name: str) -> NameRow | None:
        return next((row for row in self.rows if name in row.names), None)


def works(home: str, names: str) -> NameRow:
    """Row of names that work as in DeepSpeed. `home` is a module of ours; "ours=theirs" in `names` gives a
    name another name there.
    """
    return NameRow(NameFate.WORKS, _homes(home, names))


def mapped(home: str, names: str, note: str) -> NameRow:
    return NameRow(NameFate.MAPPED, _homes(home, names), note)


def refused(topic: str, names: str, note: str) -> NameRow:
    return NameRow(NameFate.REFUSED, dict.fromkeys(names.split(), ""), note, topic)


def inside(names: str) -> NameRow:
    """Return rows of names that are public in spelling only: DeepSpeed's own modules share them."""
    return refused(INSIDE, names, "is a part of how DeepSpeed works inside")


def absent(name: str, topic: str, why: str, *rows: NameRow) -> Module:
    """A module of which there is nothing, or only what the rows have.

    What is below it is not here either, if it has no line of its own.
    """
    return Module(name, rows, why, topic)


def _homes(home: str, names: str) -> dict[str, str]:
    homes = {}
    for pair in names.split():
        theirs, _, ours = pair.partition("=")
        homes[theirs] = home if ours == "*" else f"{home}:{ours or theirs}"
    return homes


SAME = {"deepspeed.zero": "deepspeed.runtime.zero"}
"""Modules that are other ones by a shorter name: what lies below those lies below these too."""

EXPERTS = "Experts"
PIPELINES = "Pipelines"
INFERENCE = "Inference"
TENSOR_PARALLEL = "Tensor and sequence parallelism"
COMPRESSION = "Compression and quantization"
TUNING = "Autotuning and data efficiency"
KERNELS = "Kernels"
OPTIMIZERS = "Optimizers"
CHECKPOINTS = "Checkpoints"
COMMUNICATION = "Communication"
LAUNCHING = "Launching"
MEASURING = "Measuring"
INSIDE = "How DeepSpeed works inside"

TOPICS: dict[str, str] = {
    EXPERTS: (
        "Experts live on different ranks, at every ZeRO stage: layers `MoE`, and the experts of Hugging "
        "Face's models; see [expert-parallel.md](../train/expert-parallel.md). DeepSpeed's parts of it are "
        "not functions to call."
    ),
    PIPELINES: (
        "A model is cut into stages by `PipelineModule`, and runs in `train_batch()` and `eval_batch()`; see "
        "[pipelines.md](../train/pipelines.md). DeepSpeed's instructions and messages are not here."
    ),
    INFERENCE: (
        "`init_inference()` evaluates and generates in batches, also with models larger than the memory; see "
        "[inference.md](../train/inference.md). To serve requests give vLLM or SGLang the weights: "
        "`save_16bit_model()` and `dslaunch checkpoint export` write what they and Hugging Face load."
    ),
    TENSOR_PARALLEL: (
        "Layers are divided between ranks in `initialize()`, as the ds_config's `tensor_parallel`, "
        "`tp_model_init()` or torch's DTensors say; see [tensor-parallel.md](../train/tensor-parallel.md). "
        "Sequences are divided as `sequence_parallel_size` and `register_with_transformers()` say; see "
        "[sequence-parallel.md](../train/sequence-parallel.md)."
    ),
    COMPRESSION: (
        "Nothing is quantized, neither weights nor what goes over the wire: it would change results."
    ),
    TUNING: "The launcher's `--autotuning` tries stages and batch sizes; data are the program's to choose.",
    KERNELS: (
        "The fused optimizers are here, for CPU and CUDA, and are compiled with the package. DeepSpeed's "
        "other kernels are not."
    ),
    OPTIMIZERS: "`docs/train/optimizers.md` has what is here.",
    CHECKPOINTS: (
        "Checkpoints have a format of their own, which any ZeRO stage and number of ranks loads; DeepSpeed's "
        "own are read. See `docs/train/checkpoints.md`."
    ),
    COMMUNICATION: "Collectives are torch.distributed's.",
    LAUNCHING: (
        "The launcher is another program than DeepSpeed's with the same options; its parts are "
        "not functions to call."
    ),
    MEASURING: "What is printed was measured.",
    INSIDE: (
        "Names that are spelled as public ones, and are what DeepSpeed's own modules share. "
        "Programs do without them."
    ),
}
