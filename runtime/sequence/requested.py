"""Number of ranks over which a program divides its sequences: by initialize()'s arguments, and by the
attention that has been registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from ...shared.axes import Axes
from ..errors import ConfigError
from ..log import logger
from .attention import DistributedAttention
from .exchange import TRAFFIC, SequenceRanks
from .hf_layers import check_layers, position_of
from .hugging_face import registered


def requested_sequence_size(*, by_mpu: int = 1, mesh_param: Any = None, built: int = 1) -> int:
    """Return over how many ranks sequences are divided by initialize()'s arguments, 1 if they say nothing.
    `by_mpu`: the number by its mpu; `built`: the number that the model was built for, if any.

    Errors: ConfigError for arguments that ask for something else, or that contradict each other
    """
    by_mesh = 1 if mesh_param is None else _size_of_mesh(mesh_param)
    if by_mpu > 1 and by_mesh > 1 and by_mpu != by_mesh:
        raise ConfigError(
            f"initialize(mpu=..., mesh_param={mesh_param!r}): the mpu divides sequences over {by_mpu} "
            f"ranks, and mesh_param over {by_mesh}; give one of them"
        )
    given = max(by_mpu, by_mesh)
    if 1 < built != given > 1:
        raise ConfigError(
            f"initialize(): its arguments divide sequences over {given} ranks, and the topology of the "
            f"PipelineModule over {built}; say the same in both, or leave one out"
        )
    return max(given, built)


def check_mesh_param(axes: Axes, mesh_param: Any) -> None:
    """Check that the ranks lie along the axes as initialize()'s argument mesh_param says.

    Errors: ConfigError
    """
    order = axes.order
    if mesh_param is not None and min(axes.dp, axes.sp) > 1 and order.index("sp") < order.index("dp"):
        raise ConfigError(
            f"initialize(mesh_param={tuple(mesh_param)!r}) has parts of sequences inside of data, and the "
            f"order {', '.join(order)} of axes has them outside; leave mesh_param out, and give "
            "sequence_parallel_size"
        )


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
            f"initialize(mesh_param={tuple(mesh_param)!r}): {num_data} x {size} is not what the "
            f"{num_ranks} ranks are divided into"
        )
    return int(size)


def _check_attention(module: nn.Module, axes: Axes) -> None:
    """Check that a program's own DistributedAttention uses the ranks that share a sequence.

    Errors: ConfigError
    """
    expected = list(axes.line_of(dist.get_rank(), ("sp",)))
    for name, submodule in module.named_modules():
        given = (
            dist.get_process_group_ranks(submodule.spg)
            if isinstance(submodule, DistributedAttention)
            else expected
        )
        if given != expected:
            raise ConfigError(
                f"module '{name}' has attention over ranks {given}, and {expected} share a sequence with the "
                f"order {', '.join(axes.order)} of axes; give DistributedAttention their group, or leave the "
                "order out"
            )


class DividedSequences:
    """Checks of an engine before and after a forward, where sequences are divided."""

    def __init__(self, module: nn.Module, axes: Axes, group: Any) -> None:
        """Errors: ConfigError for attention of another size, and layers that cannot see parts of sequences"""
        self._ranks = SequenceRanks.of(group or dist.group.WORLD)
        self._module = module
        self._num_forwards, self._has_warned = 0, False
        self._num_sent_before: int | None = None  # set while a forward is watched for messages
        for attention in registered():
            attention.check_size(axes.sp)
        _check_attention(module, axes)
        self._has_attention = bool(registered()) and check_layers(module)
        for attention in registered():
            attention.was_called = False

    def begin_forward(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments for the model. Check as `check_shapes` that the ranks' parts have one shape,
        and that a model of transformers is given the positions of its tokens.

        Errors: ConfigError that names what is missing or differs
        """
        is_training = self._module.training
        divided = [one for one in registered() if is_training or not one.disable_in_eval]
        if registered() and not divided:
            return args, kwargs
        if divided:
            args, kwargs = self._with_own_positions(args, kwargs)
            self._look_at_labels(kwargs)
        self.check_shapes(args, kwargs)
        self._num_sent_before = TRAFFIC.num_sent if self._num_forwards == 1 else None
        return args, kwargs

    def end_forward(self) -> None:
        """Check that the model has used the registered attention, and that it has used any attention.

        Errors: ConfigError
        """
        if self._has_attention and not any(one.was_called for one in registered()) and registered():
            names = ", ".join(repr(one.name) for one in registered())
            raise ConfigError(
                f"{type(self._module).__name__} has computed without the attention {names} that is "
                "registered for divided sequences, so each rank has seen its own part only; train it with "
                "sequence_parallel_size 1, or a model whose attention transformers looks up in "
                "ALL_ATTENTION_FUNCTIONS"
            )
        if self._num_sent_before == TRAFFIC.num_sent and dist.get_rank() == 0:
            logger.warning(
                "sequence_parallel_size is %d, and %s has sent nothing between the ranks that share a "
                "sequence: each has computed with what it was given alone. Divide its attention with "
                "DistributedAttention or UlyssesSPAttentionHF, or train it with sequence_parallel_size 1; a "
                "model without attention, or with one that sends by itself, is right as it is. This is said "
                "once",
                self._ranks.size,
                type(self._module).__name__,
            )

    def _with_own_positions(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments with a new tensor object for the positions. By its identity, layers on all
        ranks tell one forward from the next, even if a program passes the same tensor twice.
        """
        place = position_of(self._module, "position_ids")
        positions = kwargs.get("position_ids")
        if positions is None and place is not None and len(args) > place:
            positions = args[place]
        takes_tokens = bool(args) and place is not None
        takes_tokens = takes_tokens or any(name in kwargs for name in ("input_ids", "inputs_embeds"))
        if positions is None and takes_tokens:
            raise ConfigError(
                "the model is given no position_ids, and would count the places of its tokens from 0 on "
                "every rank that has a part of the sequence; give model(input_ids=..., position_ids=...), as "
                "UlyssesSPDataLoaderAdapter does"
            )
        if not isinstance(positions, Tensor):
            return args, kwargs
        own = positions.view_as(positions)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": own}
        return (*args[:place], own, *args[place + 1 :]), kwargs  # type: ignore[operator]

    def _look_at_labels(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is None or kwargs.get("shift_labels") is not None or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "the model is given labels, and shifts them inside of this rank's part of the sequence: the last "
            "token of each part has no label in its loss, which is a mean of this part alone; use "
            "mean_over_tokens(logits, labels) with labels that are shifted before they are cut, or give "
            "shift_labels, too, as UlyssesSPDataLoaderAdapter does. This is said once"
        )

    def check_shapes(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that the ranks' parts have one shape, in forwards 1, 2, 4, 8 and so on.

        Order:  a collective in these forwards
        Errors: ConfigError that names what differs
        """
        self._num_forwards += 1
        if self._num_forwards.bit_count() != 1:
            return
        leaves = tree_leaves_with_path((args, kwargs))
        own = {keystr(path): tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor)}
        everywhere = self._ranks.gather_objects(own, "what the model is given")
        for index, other in enumerate(everywhere):
            differing = [
                name for name in {**everywhere[0], **other} if everywhere[0].get(name) != other.get(name)
            ]
            if differing:
                name = differing[0]
                raise ConfigError(
                    f"parts 0 and {index} of a sequence differ in {name}: {everywhere[0].get(name)} and "
                    f"{other.get(name)}; give all {self._ranks.size} ranks that share a sequence "
                    "(sequence_parallel_size) equal parts of the same samples"
                )
