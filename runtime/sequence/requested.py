"""Over how many ranks a program divides its sequences: what initialize() is given, and what has been
registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..errors import ConfigError
from ..mesh.axes import Axes
from . import parallel_state
from .exchange import SequenceRanks
from .hugging_face import registered

_OTHERS = (
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
)


def requested_sequence_size(*, mpu: Any = None, mesh_param: Any = None, built: int = 1) -> int:
    """Return what initialize()'s arguments say, 1 where they say nothing; `built`: for how many the model was
    built, if it was built for a number.

    Errors: ConfigError for arguments that ask for something else, or that contradict each other
    """
    by_mpu = 1 if mpu is None else _size_of_mpu(mpu)
    by_mesh = 1 if mesh_param is None else _size_of_mesh(mesh_param)
    if by_mpu > 1 and by_mesh > 1 and by_mpu != by_mesh:
        raise ConfigError(
            f"initialize(mpu=..., mesh_param={mesh_param!r}): the mpu divides sequences over {by_mpu} "
            "ranks, and "
            f"mesh_param over {by_mesh}; give one of them"
        )
    given = max(by_mpu, by_mesh)
    if 1 < built != given > 1:
        raise ConfigError(
            f"initialize(): its arguments divide sequences over {given} ranks, and the topology of the "
            f"PipelineModule over {built}; say the same in both, or leave one out"
        )
    return max(given, built)


def check_mpu(mpu: Any, axes: Axes) -> None:
    """See that an mpu has the ranks that the engine has.

    Errors: ConfigError
    """
    if mpu is None or axes.sp == 1:
        return
    given = dist.get_process_group_ranks(mpu.get_sequence_parallel_group())
    expected = list(axes.line_of(dist.get_rank(), ("sp",)))
    if given != expected:
        raise ConfigError(
            f"initialize(mpu=...): ranks {given} share a sequence there, and {expected} here: those that are "
            f"neighbours once layers are divided over {axes.tp} ranks; leave mpu out, or arrange its ranks so"
        )


def _size_of_mpu(mpu: Any) -> int:
    if mpu is not parallel_state:
        for name in _OTHERS:
            if hasattr(mpu, name) and getattr(mpu, name)() > 1:
                raise ConfigError(
                    f"initialize(mpu=...): its {name}() is {getattr(mpu, name)()}; of an mpu only sequence "
                    "parallelism "
                    "is taken here. Leave it out, and divide layers with the ds_config's tensor_parallel"
                )
    if not hasattr(mpu, "get_sequence_parallel_world_size"):
        raise ConfigError(
            "initialize(mpu=...): it has no get_sequence_parallel_world_size(), and nothing else of it is "
            "used here; "
            "leave it out, and divide layers with the ds_config's tensor_parallel"
        )
    size: int = mpu.get_sequence_parallel_world_size()
    return size


def _size_of_mesh(mesh_param: Any) -> int:
    is_pair = isinstance(mesh_param, Sequence) and len(mesh_param) == 2
    if not is_pair or not all(type(one) is int and one > 0 for one in mesh_param):
        raise ConfigError(
            f"initialize(mesh_param={mesh_param!r}): is two numbers, of data parallel and of sequence "
            "parallel ranks"
        )
    num_data, size = mesh_param
    num_ranks = dist.get_world_size()
    if num_ranks % (num_data * size):
        raise ConfigError(
            f"initialize(mesh_param={tuple(mesh_param)!r}): {num_data} x {size} is not what the {num_ranks} "
            "ranks "
            "are divided into"
        )
    return int(size)


class DividedSequences:
    """What an engine looks at before a forward, where sequences are divided."""

    def __init__(self, axes: Axes, group: Any) -> None:
        self._ranks = SequenceRanks.of(group or dist.group.WORLD)
        self._num_forwards = 0
        for one in registered():
            one.check_size(axes.sp)

    def check_inputs(self, args: Any, kwargs: Any, *, is_training: bool) -> None:
        """See that the ranks' parts have one shape, in forwards 1, 2, 4, 8 and so on, and that a model of
        transformers
        is told which places its tokens have.

        Order:  a collective in these forwards
        Errors: ConfigError that names what is missing or differs
        """
        divided = [one for one in registered() if is_training or not one.disable_in_eval]
        if registered() and not divided:
            return
        names = ("input_ids", "inputs_embeds")
        takes_tokens = any(name in kwargs for name in names)
        if divided and takes_tokens and len(args) < 3 and kwargs.get("position_ids") is None:
            raise ConfigError(
                "the model is given no position_ids, and would count the places of its tokens from 0 on "
                "every rank "
                "that has a part of the sequence; give model(input_ids=..., position_ids=...), as "
                "UlyssesSPDataLoaderAdapter does"
            )
        self._num_forwards += 1
        if self._num_forwards.bit_count() != 1:
            return
        leaves = tree_leaves_with_path((args, kwargs))
        own = {keystr(path): tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor)}
        told = self._ranks.gather_objects(own, "what the model is given")
        for index, other in enumerate(told):
            differing = [name for name in {**told[0], **other} if told[0].get(name) != other.get(name)]
            if differing:
                name = differing[0]
                raise ConfigError(
                    f"parts 0 and {index} of a sequence differ in {name}: {told[0].get(name)} and "
                    f"{other.get(name)}; "
                    f"the {self._ranks.size} neighbours of sequence_parallel_size get equal parts of the "
                    "same samples"
                )
