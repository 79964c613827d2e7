"""DeepSpeed's functions that make weights of a checkpoint, and the command lines of the scripts
beside checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.export.export import FILE_NAMES, ExportOptions, export, select
from ..checkpoint.export.output_plan import DEFAULT_SHARD_SIZE, OutputPlan, Spec
from ..checkpoint.export.source import Source, open_source
from ..errors import CheckpointError, UserError
from ..zero.take_out import engines_of, is_kept, is_sharded, take_out

_LISTED = 5  # names in one message
_DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}
_log = logging.getLogger("dslaunch")


class LazyTensor:
    """A tensor that is still in its checkpoint; `contiguous()` reads it, each time anew."""

    def __init__(self, spec: Spec, read: Callable[[], Tensor]) -> None:
        self.shape, self.dtype = torch.Size(spec.shape), spec.dtype
        self._read = read

    def contiguous(self) -> Tensor:
        """Return the tensor, in host memory.

        Errors: CheckpointError if the checkpoint is damaged
        """
        return self._read()

    def numel(self) -> int:
        """Return the number of its elements."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the weights of a checkpoint by name, in host memory: masters where there are any;
    tied ones are one tensor.

    Floating-point numbers are float32; integers stay integers. `lazy_mode`:
    with LazyTensor in place of tensors.
    Errors: CheckpointError if there is none, or it is damaged
    """
    source = open_source(checkpoint_dir, tag)
    names, aliases = select(source, exclude_frozen_parameters=exclude_frozen_parameters)
    state: dict[str, Any] = {}
    kept = source.kept_dtypes()
    for name in names:
        shape, dtype = source.names()[name]
        is_converted = dtype.is_floating_point and name not in kept
        spec = Spec(tuple(shape), torch.float32 if is_converted else dtype)
        lazy = LazyTensor(spec, _reader(source, name, spec.dtype))
        state[name] = lazy if lazy_mode else lazy.contiguous()
    return state | {other: state[name] for other, name in aliases.items()}


def _reader(source: Source, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: source.tensor(name).to(dtype)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = DEFAULT_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> OutputPlan:
    """Write the weights of a checkpoint into the folder `output_dir`, as from_pretrained()
    of transformers reads them.

    That is pytorch_model.bin, or model.safetensors with `safe_serialization`, in several files with an index
    if there is more than `max_shard_size`. `dtype` is that of floating-point numbers, as torch's or by its
    name; integers stay integers. Memory: a file of .bin at a time, or a tensor of safetensors.
    Errors: CheckpointError for another dtype, if there is no checkpoint, it is damaged,
            or the files cannot be written
    """
    options = ExportOptions(
        dtype=_output_dtype(dtype),
        file_name=FILE_NAMES["safetensors" if safe_serialization else "bin"],
        max_shard_size=max_shard_size,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    return export(open_source(checkpoint_dir, tag), output_dir, options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = DEFAULT_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> OutputPlan:
    """`convert_zero_checkpoint_to_state_dict` in float32."""
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.").lower()
    if name not in _DTYPES:
        raise CheckpointError(
            f"convert_zero_checkpoint_to_state_dict(dtype={dtype!r}): must be one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move the model to host memory, load the float32 weights of a checkpoint into it, and return it.

    A model whose parameters are sharded is plain and whole afterwards, with the float32 values, and its
    engine has ended. Names that only one of the two has are no error, but a warning. Each rank may call it
    alone.
    Errors: CheckpointError if there is no checkpoint, it is damaged, a shape differs, or it lacks
            a parameter of which this rank has a shard
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if any(map(is_sharded, model.parameters())):
        _take_out(model, state, checkpoint_dir)
    model = model.cpu()
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes that differ
        raise CheckpointError(f"{checkpoint_dir}: {' '.join(str(error).split())}") from error
    for names, where in ((missing, "the checkpoint lacks"), (unexpected, "the model lacks")):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            _log.warning("%s: %s %s%s", checkpoint_dir, where, ", ".join(names[:_LISTED]), more)
    return model


def _take_out(model: nn.Module, state: Mapping[str, Tensor], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Let parameters that an engine or zero.Init has be plain ones with the values of a checkpoint."""
    kept = {name: param for name, param in model.named_parameters() if is_kept(param)}
    own = set(map(id, kept.values()))
    for engine in engines_of(model):
        for sub_buffer in (sub_buffer for unit in engine.units for sub_buffer in unit.sub_buffers):
            for member in sub_buffer.members:
                if id(member.param) not in own and is_sharded(member.param):
                    raise CheckpointError(
                        "load_state_dict_from_zero_checkpoint() was given a part of an engine's module, "
                        f"without '{member.name}': give it engine.module, or call engine.load_checkpoint()"
                    )
    for name, param in kept.items():
        if name in state and state[name].shape != param.shape:
            raise CheckpointError(
                f"{checkpoint_dir}: size mismatch for {name}: the checkpoint has {tuple(state[name].shape)}, "
                f"and the model {tuple(param.shape)}"
            )
        if name not in state and is_sharded(param):
            raise CheckpointError(
                f"{checkpoint_dir}: the checkpoint lacks {name}, of which each rank has a shard; save with "
                "all parameters, or call engine.load_checkpoint()"
            )
    take_out(
        {param: state[name] for name, param in kept.items() if name in state},
        by="load_state_dict_from_zero_checkpoint()",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script zero_to_fp32.py that lies beside checkpoints.

    The program ends with 0, or 2 and one line.
    """
    parser = _parser("zero_to_fp32.py", "Write the float32 weights of a checkpoint")
    _convert(parser, parser.parse_args(argv), torch.float32)


def main_with_dtype(argv: Sequence[str] | None = None) -> None:
    """Run the script zero_to_torch.py, which is told the dtype.

    The program ends with 0, or 2 and one line.
    """
    parser = _parser("zero_to_torch.py", "Write the weights of a checkpoint in a dtype")
    parser.add_argument("--dtype", required=True, choices=sorted(_DTYPES), help="of floating-point numbers")
    given = parser.parse_args(argv)
    _convert(parser, given, _DTYPES[given.dtype])


def _parser(prog: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{what} as files that transformers and torch.load read.",
        epilog="`dslaunch checkpoint export --help` has more.",
    )
    parser.add_argument("checkpoint_dir", help="the folder that holds the checkpoints and `latest`")
    parser.add_argument("output_dir", help="the folder to write to")
    parser.add_argument("-t", "--tag", help="which checkpoint; default: what `latest` names")
    parser.add_argument(
        "--max_shard_size", default=DEFAULT_SHARD_SIZE, help="of one file, e.g. 5GB (the default), 200MB"
    )
    parser.add_argument(
        "--safe_serialization", action="store_true", help="safetensors; default: what torch.save writes"
    )
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="a traceback with an error")
    return parser


def _convert(parser: argparse.ArgumentParser, given: argparse.Namespace, dtype: torch.dtype) -> None:
    try:
        plan = convert_zero_checkpoint_to_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            dtype,
            max_shard_size=given.max_shard_size,
            safe_serialization=given.safe_serialization,
            tag=given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
        )
    except UserError as error:
        if given.debug:
            raise
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"{Path(given.output_dir) / (plan.index_name or plan.files[0].name)}: {plan.summary()}")
