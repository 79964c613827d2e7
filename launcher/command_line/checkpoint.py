"""`dslaunch checkpoint`: options only.

The work is done by the runtime's checkpoint/inspect/command.py, which runs in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import click

from ..options.number import Whole
from .command_group import CommandGroup
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch checkpoint ls out
      which checkpoints the folder `out` holds, and which of them can be loaded
  dslaunch checkpoint verify out
      read the newest one, and compare every byte with what was written
  dslaunch checkpoint diff out/global_step100 out/global_step200 --values
      what changed between the two, down to the numbers
  dslaunch checkpoint prune out --keep 2
      remove all but the two newest
  dslaunch checkpoint export out weights --dtype bfloat16
      weights that from_pretrained() of transformers reads

A folder is the one that was given to save_checkpoint(): on a disk, or a URL such as s3://bucket/run1, for
which fsspec has a package (s3fs, gcsfs, adlfs). Nothing here needs the ranks or the GPUs that wrote a
checkpoint. Each command has a --help of its own.

\b
The exit code is 0; 1 if verify found damage, or diff a difference; 2 for a mistake in what was given.
"""


@click.group(
    cls=CommandGroup, example="ls DIR", epilog=EPILOG, context_settings=SETTINGS, no_args_is_help=False
)
def command(**given: Any) -> None:
    """Look at checkpoints, check them, compare them, remove old ones, and export their weights for other
    programs.
    """


def _place(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Make paths absolute: the program that gets them runs elsewhere."""
    if value is None or "://" in value:
        return value
    if not value:
        raise click.BadParameter("it is empty; give a folder, or . for the present one")
    return os.path.abspath(os.path.expanduser(value))


def _run(action: str, given: dict[str, Any]) -> int:
    from .runtime_program import run_program

    return run_program("checkpoint.inspect", {"action": action, **given}, what="dslaunch checkpoint")


_FOLDER = click.argument("folder", metavar="DIR", callback=_place)
_JSON = click.option("--json", is_flag=True, help="Print it as JSON.")


@command.command(
    "ls",
    cls=PrefixCommand,
    short_help="Show the checkpoints in DIR.",
    context_settings=SETTINGS,
    epilog="""
\b
Examples:
  dslaunch checkpoint ls out
  dslaunch checkpoint ls s3://bucket/run1 --json

\b
States:
  good     every file is there with all of its bytes; `verify` reads them, too
  partial  a save that is under way, or was cut off; nothing loads it, and the next save of that tag
           replaces it
  damaged  a file is missing or cut off; the line below the table says which
  missing  `latest` names it, and it is not there
""",
)
@_FOLDER
@_JSON
def _ls(**given: Any) -> int:
    """Show the checkpoints in DIR, oldest first: step, time, size, ranks and ZeRO stage that wrote
    it, and its state.
    """
    return _run("ls", given)


@command.command(
    "verify",
    cls=PrefixCommand,
    short_help="Compare every byte of one with what was written.",
    context_settings=SETTINGS,
    epilog="""
\b
Examples:
  dslaunch checkpoint verify out
  dslaunch checkpoint verify out global_step100 && rm -r older

\b
The exit code is 0 if every byte is what was written, and 1 with the file named if one is not.
""",
)
@_FOLDER
@click.argument("tag", required=False)
def _verify(**given: Any) -> int:
    """Read the checkpoint TAG in DIR, default the one that `latest` names,
    and compare it with its digests.
    """
    return _run("verify", given)


@command.command(
    "diff",
    cls=PrefixCommand,
    short_help="Show in what two differ.",
    context_settings=SETTINGS,
    epilog="""
\b
Examples:
  dslaunch checkpoint diff out/global_step100 out/global_step200
  dslaunch checkpoint diff run1 run2 --values --json

\b
Tensors have the names of the checkpoint: model.<name> for parameters and buffers,
optimizer.state.<name>.<state> for masters and moments. The exit code is 1 if there is a difference, as
with diff.
""",
)
@click.argument("a", metavar="A", callback=_place)
@click.argument("b", metavar="B", callback=_place)
@click.option(
    "--values",
    is_flag=True,
    help=(
        "Compare the numbers, too: which tensors have other bits, in how many elements, by how much at most."
    ),
)
@_JSON
def _diff(**given: Any) -> int:
    """Show how the checkpoints A and B differ: names, shapes, dtypes, counters,
    hyper-parameters, ds_config.

    A and B are folders of one checkpoint each; of a folder with several, the one that `latest` names is
    compared.
    """
    return _run("diff", given)


@command.command(
    "prune",
    cls=PrefixCommand,
    short_help="Remove old ones.",
    context_settings=SETTINGS,
    epilog="""
\b
Examples:
  dslaunch checkpoint prune out --keep 3 --dry_run
  dslaunch checkpoint prune out --keep 3

\b
With "checkpoint": {"keep_last": 3} in the ds_config every save does it.
""",
)
@_FOLDER
@click.option("--keep", type=Whole(1), required=True, metavar="N", help="How many of the newest to keep.")
@click.option("--dry_run", is_flag=True, help="Only show what would be removed.")
def _prune(**given: Any) -> int:
    """Remove the checkpoints in DIR but the N newest.

    The one that `latest` names stays, however old it is.
    """
    return _run("prune", given)


@command.command(
    "export",
    cls=PrefixCommand,
    short_help="Write weights for other programs.",
    context_settings=SETTINGS,
    epilog="""
\b
Examples:
  dslaunch checkpoint export out weights
      weights/model.safetensors in float32, or several files with model.safetensors.index.json
  dslaunch checkpoint export out weights --tag global_step100 --dtype bfloat16
  dslaunch checkpoint export out weights --format bin --max_shard_size 2GB
      weights/pytorch_model-00001-of-...bin, which torch.load() reads

\b
To load them with transformers, the model's config.json and its tokenizer have to be in OUT, too; they are
no part of a checkpoint: model.config.save_pretrained(OUT). Tied weights are written once. One tensor is in
memory at a time, with --format bin one file.
""",
)
@_FOLDER
@click.argument("out", metavar="OUT", callback=_place)
@click.option("--tag", metavar="TAG", help="Which checkpoint.  [default: the one that `latest` names]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="Of the numbers. Float32 comes from the masters of training in 16 bits.  [default: float32]",
)
@click.option(
    "--format",
    type=click.Choice(["safetensors", "bin"]),
    default="safetensors",
    help="Of the files.  [default: safetensors]",
)
@click.option(
    "--max_shard_size",
    default="5GB",
    metavar="SIZE",
    help="Of one file: e.g. 200MB, 5GB, 1GiB.  [default: 5GB]",
)
@click.option("--exclude_frozen_parameters", is_flag=True, help="Leave out what was not trained.")
def _export(**given: Any) -> int:
    """Write the weights of a checkpoint in DIR into the folder OUT, as other programs read them."""
    return _run("export", given)
