"""An engine's memory on its device, for who needs it for something else between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ConfigError
from ..zero.offload_kinds import OffloadDeviceEnum, OffloadStateTypeEnum
from ..zero.parked_states import read_kinds
from ..zero.sharded_model import ShardedModel


class OffloadStates:
    """Not collectives: every rank may decide for itself, and later no rank goes on before all
    have everything again.
    """

    device: torch.device
    _model: ShardedModel

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move these states, default all, to host memory until `reload_states()`,
        and give up their memory on the device.

        For the time between a step and the next forward. Without an accelerator they only lie
        elsewhere in host memory. Parameters that are gone refuse to be used, and the engine refuses
        whatever needs the rest.
        Errors: ConfigError for other states or devices than there are, or while gathered
                parameters are in use
        """
        if device != OffloadDeviceEnum.cpu:
            raise ConfigError(
                f'offload_states(device={device!r}): states can go to host memory only; write "cpu", or '
                "leave it out"
            )
        self._model.check_averaged()
        self._model.offload(read_kinds(include), pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back all that `offload_states()` has moved, into the same tensors."""
        self._model.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Give up memory that is kept for the next use: parameters that were gathered early,
        and what the allocator holds.
        """
        self._model.free_idle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
