"""Parts of a model that lie in no unit: buffers, parameters of wide integers, and what is small and whole of
packed parameters.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...comm.rank_group import RankGroup
from ...errors import ConfigError
from ...mesh.domain import Domain, Domains
from ...placement.precision import Precision
from ...strided import is_strided, kind_of
from ..parameters.packed import PackedOf, lies_in_unit
from .kept_buffers import kept_buffers


def place_beside_units(
    module: nn.Module,
    packed: PackedOf,
    *,
    device: torch.device,
    domains: Domains,
    precision: Precision,
) -> None:
    """Move what no unit holds to the device and take the values of the first of those that share it.

    Order:  a collective
    Errors: ConfigError for a buffer that ranks cannot send each other
    """
    kept = {id(one) for one in kept_buffers(module, precision.kept, precision.parameters)}
    for name, tensor in _beside(module):
        dtype = precision.buffers if tensor.is_floating_point() else None
        dtype = torch.float32 if id(tensor) in kept else dtype
        comm = domains.of(tensor).comm
        if not is_strided(tensor):
            _replace(module, tensor, _like_first(name, tensor, comm.sharers, device=device, dtype=dtype))
            continue
        whole = tensor.detach().to(device=device, dtype=dtype).resolve_conj().resolve_neg().contiguous()
        comm.broadcast(whole.reshape(-1).view(torch.uint8), what="a buffer")  # NCCL lacks 16-bit integers
        if tensor.is_conj() or tensor.is_neg():
            _replace(module, tensor, whole)
        else:
            tensor.data = whole
    _share_whole(module, packed, domains)


@torch.no_grad()
def _share_whole(module: nn.Module, packed: PackedOf, domains: Domains) -> None:
    """Take the small tensors of packed parameters from the first of those that share them, in one message for
    each domain.
    """
    by_domain: dict[Domain, list[Tensor]] = {}
    for param in module.parameters():
        if id(param) in packed:
            by_domain.setdefault(domains.of(param), []).extend(packed[id(param)].whole.values())
    for domain, tensors in by_domain.items():
        if tensors and not domain.comm.sharers.is_alone:
            sent = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in tensors])
            domain.comm.broadcast(sent, what="what packed parameters have whole")
            first = 0
            for tensor in tensors:
                values = sent[first : first + tensor.nbytes].clone()  # at a place that suits any dtype
                tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
                first += tensor.nbytes


def _beside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in module.named_parameters():
        if not lies_in_unit(param):
            yield name, param
    yield from module.named_buffers()


def _like_first(
    name: str, tensor: Tensor, sharers: RankGroup, *, device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    """Return a tensor that is not strided, as the first of those that share it has it.

    Errors: ConfigError, on all of them, if it cannot be sent
    """
    if tensor.is_meta:
        raise ConfigError(f"buffer '{name}' is on the meta device; give it storage before initialize()")
    own, problem = b"", ""
    if sharers.is_first and not sharers.is_alone:
        try:
            own = _packed(tensor)
        except Exception as error:  # a class of tensors may raise any
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    # The others send nothing.
    content, problem = sharers.all_gather_objects((own, problem), what=f"buffer '{name}'")[0]
    if problem:
        raise ConfigError(
            f"buffer '{name}' is {kind_of(tensor)}, which ranks cannot send each other ({problem}); register "
            "a dense or sparse tensor in its place, and make this one of it in the forward"
        )
    whole = (
        torch.load(io.BytesIO(content), weights_only=False) if content and not sharers.is_first else tensor
    )
    moved: Tensor = whole.to(device=device, dtype=dtype) if _moves(whole, device, dtype) else whole
    return moved


def _packed(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu(), buffer)
    return buffer.getvalue()


def _moves(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether it has to be another: mkldnn's tensors, for example, cannot be moved even to where they are."""
    return tensor.device != device or (dtype is not None and tensor.dtype != dtype)


def _replace(module: nn.Module, tensor: Tensor, whole: Tensor) -> None:
    """Let the other tensor be what the first one was: to set `data` of a sparse one changes nothing."""
    if whole is tensor:
        return
    for one in module.modules():
        for name, buffer in one._buffers.items():
            if buffer is tensor:
                one._buffers[name] = whole
        for param in one._parameters.values():
            if param is tensor:
                param.data = whole
