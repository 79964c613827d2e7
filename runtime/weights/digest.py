"""A digest of weights, by which a receiver tells whether what arrived is what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError

_CHUNK = 1 << 24  # bytes that go to host memory together


class WeightsDigest:
    """Digests of tensors by name, and one of all, which does not depend on the order.

    A tensor's digest is of its name, dtype, shape and bytes. It costs about a second for each GB.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.tensors: dict[str, str] = {}  # name -> dtype, shape and hash, in words
        for name, tensor in tensors:
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one more tensor."""
        shown = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        hashed = hashlib.blake2b(f"{name} {shown}".encode(), digest_size=16)
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, content.numel(), _CHUNK):
            hashed.update(content[start : start + _CHUNK].cpu().numpy().data)
        self.tensors[name] = f"{shown} {hashed.hexdigest()}"

    def __str__(self) -> str:
        """32 hexadecimal digits of all tensors."""
        hashed = hashlib.blake2b(digest_size=16)
        for name, one in sorted(self.tensors.items()):
            hashed.update(f"{name} {one}\n".encode())
        return hashed.hexdigest()

    def check(self, received: Mapping[str, str]) -> None:
        """Compare with `tensors` of the receiver's digest.

        Errors: ConfigError that names the first tensor that differs
        """
        for name in [*self.tensors, *received]:
            sent, arrived = self.tensors.get(name, "nothing"), received.get(name, "nothing")
            if sent != arrived:
                raise ConfigError(
                    f"'{name}' was sent as {sent}, and arrived as {arrived}; nothing may be generated with "
                    "it: send the weights again"
                )
