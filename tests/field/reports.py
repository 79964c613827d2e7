"""Table of the reports: what each says, what is right, and the program that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.field.judge import (
    BF16_ROUNDING,
    Judge,
    agree,
    at_most,
    both,
    ends,
    fails,
    is_equal,
    refuses,
)
from tests.field.run import Launch

REPOSITORIES = {
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "DeepSpeedExamples": "deepspeedai/DeepSpeedExamples",
    "Qwen-VL-Series-Finetune": "2U1/Qwen-VL-Series-Finetune",
    "accelerate": "huggingface/accelerate",
    "ms-swift": "modelscope/ms-swift",
    "open-instruct": "allenai/open-instruct",
    "transformers": "huggingface/transformers",
    "trl": "huggingface/trl",
}
CLUSTERS = {
    "A": "Generation while training",
    "B": "Ranks that wait for each other",
    "C": "Memory of the host",
    "D": "Checkpoints",
    "E": "Wrong numbers",
    "F": "Pretrained weights at ZeRO-3",
    "G": "Muon",
    "H": "Starting",
}
RIGHT, SAID, WRONG = "right", "says so", "wrong"
LIMIT_S = 100.0  # of one launch; two ranks start in half a minute where other jobs keep the cores busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One public thread. `id` is repository#number, `cluster` a letter of CLUSTERS.

    `happens` and `right` are sentences of the page: what the thread tells, and what should come out.
    `judge` says in words what of a run is not right. `said` is a regular expression of the message by which
    a program that cannot go on names the cause. `dslaunch`: what dslaunch gives, which a test holds it to.
    `is_error_right`: that message is what is right.
    `is_fast`: one of the few that `make test` runs.
    """

    id: str
    cluster: str
    program: str
    happens: str
    right: str
    judge: Judge
    launches: tuple[Launch, ...] = (Launch(),)
    limit_s: float = LIMIT_S
    said: str = ""
    is_error_right: bool = False
    dslaunch: str = RIGHT
    is_fast: bool = False

    @property
    def link(self) -> str:
        repository, _, number = self.id.partition("#")
        return f"https://github.com/{REPOSITORIES[repository]}/issues/{number}"

    @property
    def command(self) -> str:
        """The program with its words, once for each launch, and how many ranks if these are not two."""
        starts = []
        for launch in self.launches:
            words = [word for word in launch.words if not launch.is_by_launcher]
            on = "" if launch.ranks == Launch().ranks else f" on {launch.ranks} rank"
            starts.append(f"`{' '.join((f'{self.program}.py', *words))}`{on}")
        return ", then ".join(starts)


SAME_LOSSES = agree("losses", "plain")
PROMPT = 'it\'s "-4C" outside; $HOME'
OTHER_WORLD = r"The checkpoint being loaded used a DP world size of \d+ but the current world size is \d+"
SAVE, LOAD = Launch(words=("save",)), Launch(words=("load",))


def at(*words: str, ranks: int = 2) -> tuple[Launch, ...]:
    """Return one launch with these words of the program."""
    return (Launch(ranks=ranks, words=words),)


GENERATION = (
    Report(
        id="DeepSpeed#8262",
        cluster="A",
        program="generate_unequal",
        happens="At ZeRO-3 one rank's answer ends before the other's, and the job stands still: one rank "
        "gathers weights for its next token, the other is at the next step.",
        right="Each rank gets its own answer, and training goes on.",
        judge=agree("lengths", "wanted"),
        is_fast=True,
    ),
    Report(
        id="DeepSpeed#860",
        cluster="A",
        program="generate_told",
        happens="`generate()` hangs at ZeRO-3 with answers of different lengths; here transformers knows "
        "the ds_config.",
        right="Each rank gets its own answer, and training goes on.",
        judge=agree("lengths", "wanted"),
    ),
    Report(
        id="trl#2877",
        cluster="A",
        program="generate_gathered",
        happens="Weights are gathered at ZeRO-3 before each step, to generate with them elsewhere; an "
        "assertion about a parameter's state ends the training.",
        right="The losses of plain torch, generating and training in turn.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#4533",
        cluster="A",
        program="forwards_without_backward",
        happens="PPO at ZeRO-3 runs the model more often than it asks for gradients; an assertion that a "
        "parameter is available fails.",
        right="The losses of plain torch, in which these runs leave nothing behind.",
        judge=SAME_LOSSES,
        is_fast=True,
    ),
    Report(
        id="trl#3858",
        cluster="A",
        program="generate_gathers",
        happens="GRPO at ZeRO-3 generates without gathering the model first: every token sends all weights, "
        "and the first step takes ten hours.",
        right="Where the weights fit, a longer answer takes no more collectives than a short one.",
        judge=agree("many", "few"),
    ),
    Report(
        id="trl#2840",
        cluster="A",
        program="sync_while_training",
        happens="After hours of GRPO at ZeRO-3, for some after a checkpoint, an assertion about a "
        "parameter's modules ends the gathers before a sync.",
        right="The losses and weights of plain torch, with forwards without a backward, one that fails, "
        "saves, and reads of single parameters in between.",
        judge=both(SAME_LOSSES, agree("synced", "whole")),
    ),
    Report(
        id="ms-swift#7986",
        cluster="A",
        program="memory_of_sync",
        happens="Before the first batch of GRPO at ZeRO-3 the weights are sent to the sampler, each rank has "
        "the whole model of 64 GB at once, and memory runs out.",
        right="Weights that are read one at a time need the memory of a block, not of the model.",
        judge=at_most("grown", "allowed"),
    ),
    Report(
        id="ms-swift#9787",
        cluster="A",
        program="sync_twice",
        launches=at(ranks=4),
        happens="On two hosts at ZeRO-3 the first sync of weights is right, and after a step, even one with "
        "a learning rate of 0, the sampler writes nothing but exclamation marks.",
        right="Steps with a learning rate of 0 leave every bit of the weights as it was.",
        judge=agree("later", "first", within=0.0),
    ),
)

WAITING = (
    Report(
        id="DeepSpeed#7170",
        cluster="B",
        program="mixed_batches",
        launches=at("3"),
        happens="A model of pictures and text at ZeRO-3: one rank's batch has pictures, the other's has "
        "none, and training hangs.",
        right="The losses of plain torch, where a batch without pictures adds nothing to the tower's "
        "gradient.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="Qwen-VL-Series-Finetune#17",
        cluster="B",
        program="mixed_batches",
        launches=at("2"),
        happens="Batches with pictures and batches of text alone fail together at ZeRO-2.",
        right="The losses of plain torch.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#4808",
        cluster="B",
        program="unused_experts",
        happens="Mixtral at ZeRO-3: experts without tokens are not run, and differ from rank to rank; an "
        "error about parameters in flight, or a hang.",
        right="The losses of plain torch, where an expert without tokens has a gradient of zeros.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#2993",
        cluster="B",
        program="save_on_rank_0",
        happens="`save_checkpoint()` under `if rank == 0` stands still.",
        right="An error that names the ranks and where they are.",
        judge=ends,
        said=r"rank \d came to .* where rank \d came to .*?: the ranks took different paths",
        is_error_right=True,
    ),
)

MEMORY = (
    Report(
        id="DeepSpeed#1236",
        cluster="C",
        program="memory_of_resume",
        launches=(SAVE, LOAD),
        happens="Each rank loads the states of all ranks into memory when it resumes; what could be trained "
        "cannot be resumed.",
        right="No rank grows by more than its own part of the states and one copy of the weights.",
        judge=at_most("grown", "allowed"),
    ),
    Report(
        id="DeepSpeed#5290",
        cluster="C",
        program="memory_of_pretrained",
        happens="With each further rank a pretrained model at ZeRO-3 needs more host memory to be loaded.",
        right="No rank's own memory grows by as much as the whole model.",
        judge=at_most("grown", "allowed"),
    ),
)

CHECKPOINTS = (
    Report(
        id="DeepSpeed#2898",
        cluster="D",
        program="resume_elsewhere",
        launches=(Launch(words=("1", "save")), Launch(ranks=1, words=("1", "load"))),
        happens="A checkpoint of ZeRO-1 is refused by another number of ranks.",
        right="The losses of plain torch without an interruption.",
        judge=SAME_LOSSES,
        said=OTHER_WORLD,
    ),
    Report(
        id="DeepSpeed#6441",
        cluster="D",
        program="resume_elsewhere",
        launches=(Launch(words=("3", "save")), Launch(ranks=1, words=("3", "load"))),
        happens="A checkpoint of ZeRO-3 is refused by another number of ranks; DeepSpeed's way is to "
        "convert it to a universal one first.",
        right="The losses of plain torch without an interruption.",
        judge=SAME_LOSSES,
        said=OTHER_WORLD,
    ),
    Report(
        id="DeepSpeed#3090",
        cluster="D",
        program="frozen_resume",
        launches=(SAVE, LOAD),
        happens="Frozen weights are not in a checkpoint of ZeRO-3: after a resume they are random.",
        right="All weights are those that were saved, to the bit.",
        judge=is_equal("lost", []),
    ),
    Report(
        id="DeepSpeedExamples#353",
        cluster="D",
        program="tied_saved",
        happens="Weights that are saved whole at ZeRO-3 lack the tied ones; loading them says `Missing "
        "key(s)`.",
        right="The file has every name, and a new model computes what the trained one does.",
        judge=both(is_equal("missing", []), at_most("off", "allowed")),
        is_fast=True,
    ),
    Report(
        id="DeepSpeed#2413",
        cluster="D",
        program="zero_to_fp32",
        happens="In what is saved at ZeRO-3 some weights have the shape 0.",
        right="`get_fp32_state_dict_from_zero_checkpoint()` gives all weights, to the bit.",
        judge=is_equal("lost", []),
    ),
    Report(
        id="DeepSpeed#762",
        cluster="D",
        program="weights_only",
        happens="Weights are loaded without the optimizer: its float32 copies stay random, and the first "
        "step brings them back into the model.",
        right="After a step with a learning rate of almost 0 the weights are those of the file.",
        judge=at_most("off", "allowed"),
    ),
)

NUMBERS = (
    Report(
        id="DeepSpeed#988",
        cluster="E",
        program="checkpointed_twice",
        launches=at("siamese"),
        happens="A model that runs on two inputs with activation checkpointing at ZeRO-2: an error that a "
        "gradient was computed twice.",
        right="The losses of plain torch.",
        judge=SAME_LOSSES,
        said=r"The parameter \S+ has already been reduced.\s+Gradient computed twice for this partition",
    ),
    Report(
        id="DeepSpeed#2103",
        cluster="E",
        program="checkpointed_twice",
        launches=at("recursive"),
        happens="One layer that takes the place of several, with activation checkpointing: the same error.",
        right="The losses of plain torch.",
        judge=SAME_LOSSES,
        said=r"The parameter \S+ has already been reduced.\s+Gradient computed twice for this partition",
    ),
    Report(
        id="accelerate#3877",
        cluster="E",
        program="accumulation_stage2",
        happens="The loss at ZeRO-2 depends on how a batch is cut into micro batches.",
        right="The losses of plain torch with the whole batch.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#1488",
        cluster="E",
        program="accumulation_stages",
        happens="With micro batches each stage has losses of its own.",
        right="The losses of plain torch at the stages 0 to 3.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="open-instruct#1498",
        cluster="E",
        program="manual_accumulation",
        happens="A program calls `backward()` several times before a `step()`, which the ds_config does not "
        "say: ZeRO-2 drops all gradients but the last. Since 0.19.5 it has a key for it, "
        "`managed_gradient_accumulation`.",
        right="The losses of plain torch, which adds them up.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#7718",
        cluster="E",
        program="grad_norm",
        launches=at("2"),
        happens="From 0.17.6 on gradients of ZeRO-2 are too small.",
        right="The norms of plain torch's gradients.",
        judge=agree("norms", "plain"),
    ),
    Report(
        id="DeepSpeed#7837",
        cluster="E",
        program="grad_norm_bf16",
        happens="In bfloat16 at stage 0 gradients are not set to zero after a step, and their norm grows.",
        right="The norms of plain torch's gradients in float32, within 5 %.",
        judge=agree("norms", "plain", within=BF16_ROUNDING),
    ),
    Report(
        id="DeepSpeed#7255",
        cluster="E",
        program="grad_norm",
        launches=at("0"),
        happens="At stage 0 there is no norm of the gradient in the logs, as there is at all others.",
        right="`get_global_grad_norm()` gives the norms of plain torch's gradients.",
        judge=agree("norms", "plain"),
    ),
    Report(
        id="DeepSpeed#966",
        cluster="E",
        program="tied_stages",
        happens="A model with tied layers and one that is not used has other losses at each stage.",
        right="The losses of plain torch at the stages 0 to 3.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#6926",
        cluster="E",
        program="hpz",
        happens="With `zero_hpz_partition_size` the loss stays where it was.",
        right="The losses of plain torch.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#7606",
        cluster="E",
        program="hpz_resume",
        launches=(SAVE, LOAD),
        happens="With `zero_hpz_partition_size` the first loss after a resume is too high.",
        right="The losses of plain torch without an interruption.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#7220",
        cluster="E",
        program="clipping",
        happens="With `gradient_clipping` at ZeRO-3 norms above the limit are logged: is anything clipped?",
        right="The losses of plain torch with clipped gradients.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#8279",
        cluster="E",
        program="zero_sized",
        happens="A last parameter without elements ends training at ZeRO-1 and 2 with an error.",
        right="The losses of plain torch at both stages.",
        judge=SAME_LOSSES,
    ),
    Report(
        id="DeepSpeed#8260",
        cluster="E",
        program="bucket_of_zero",
        happens="`reduce_bucket_size` 0 is accepted, and the first backward pass divides by it.",
        right="The losses of plain torch, or an error that names the key.",
        judge=SAME_LOSSES,
        said=r"(?:zero_optimization\.)?reduce_bucket_size\W.*",
        is_error_right=True,
    ),
)

PRETRAINED = (
    Report(
        id="DeepSpeed#7848",
        cluster="F",
        program="pretrained",
        launches=at("qwen3_next"),
        happens="`from_pretrained()` of Qwen3-Next at ZeRO-3 reports all weights as missing, and training "
        "begins from noise.",
        right="All weights are those of the file, to the bit.",
        judge=is_equal("lost", []),
    ),
    Report(
        id="transformers#43257",
        cluster="F",
        program="pretrained",
        launches=at("qwen3_moe"),
        happens="Experts that lie apart in the file do not come into the fused ones of transformers 5 at "
        "ZeRO-3.",
        right="All weights are those of the file, to the bit.",
        judge=is_equal("lost", []),
    ),
)

MUON = (
    Report(
        id="DeepSpeed#8441",
        cluster="G",
        program="muon_spread",
        launches=at("0"),
        happens="Muon at stage 0 is plain SGD: nothing makes its updates orthogonal.",
        right="The singular values of each matrix's update lie close together.",
        judge=is_equal("is_orthogonal", True),
    ),
    Report(
        id="DeepSpeed#8438",
        cluster="G",
        program="muon_spread",
        launches=at("3", "init"),
        happens="Under `zero.Init` no parameter counts as a matrix, and all are trained by AdamW.",
        right="The singular values of each matrix's update lie close together.",
        judge=is_equal("is_orthogonal", True),
    ),
    Report(
        id="DeepSpeed#7807",
        cluster="G",
        program="muon_twice",
        launches=at("scattered"),
        happens="Muon at ZeRO-2 takes pieces of a gradient for the whole, on each rank other ones.",
        right="Both ranks have the weights that Muon gives for whole gradients, or an error names what to "
        "set.",
        judge=at_most("off", "allowed"),
        said=r"Muon.*reduce_scatter.*",
        is_error_right=True,
    ),
    Report(
        id="DeepSpeed#8463",
        cluster="G",
        program="muon_twice",
        launches=at("offload"),
        happens="With states in host memory Muon trains differently: the loss is off by 9.4e-2 after 100 "
        "steps.",
        right="The same weights as without offload.",
        judge=at_most("off", "allowed"),
    ),
    Report(
        id="DeepSpeed#8443",
        cluster="G",
        program="muon_twice",
        launches=at("accumulation"),
        happens="Muon at ZeRO-3 makes a step's update of each micro batch.",
        right="The same weights with four micro batches as with one.",
        judge=at_most("off", "allowed"),
    ),
)

STARTING = (
    Report(
        id="DeepSpeed#618",
        cluster="H",
        program="one_rank_fails",
        launches=(Launch(is_by_launcher=True),),
        happens="A rank fails, and the launcher ends with exit code 0.",
        right="All ranks are ended, and the exit code is not 0.",
        judge=fails,
    ),
    Report(
        id="DeepSpeedExamples#575",
        cluster="H",
        program="arguments",
        launches=(Launch(is_by_launcher=True, options=("--hostfile", "no-such-file")),),
        happens="A hostfile that is not found is a warning; the job runs on this machine alone.",
        right="An error that names the file, and no rank is started.",
        judge=refuses("no-such-file"),
    ),
    Report(
        id="DeepSpeed#3669",
        cluster="H",
        program="arguments",
        launches=(
            Launch(
                is_by_launcher=True,
                options=("--hostfile", "hosts"),
                files=(("hosts", "worker-1 slots=8\nworker-2 lots=8\n"),),
            ),
        ),
        happens="The error of a bad line in a hostfile shows `{line}` in place of it.",
        right="An error that shows the line, and no rank is started.",
        judge=refuses("worker-2 lots=8"),
    ),
    Report(
        id="DeepSpeed#4523",
        cluster="H",
        program="arguments",
        launches=(Launch(is_by_launcher=True, words=("--instruction=write a query",)),),
        happens='`--name="some words"` comes to the program as several arguments.',
        right="Each argument as it was written.",
        judge=is_equal("words", ["--instruction=write a query"]),
    ),
    Report(
        id="DeepSpeed#4716",
        cluster="H",
        program="arguments",
        launches=(Launch(is_by_launcher=True, words=("--prompt", PROMPT)),),
        happens="An argument with quotes in it comes to the program changed, or as several.",
        right="Each argument as it was written.",
        judge=is_equal("words", ["--prompt", PROMPT]),
        is_fast=True,
    ),
)

REPORTS = (*GENERATION, *WAITING, *MEMORY, *CHECKPOINTS, *NUMBERS, *PRETRAINED, *MUON, *STARTING)
