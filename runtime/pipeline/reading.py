"""Check that all ranks have read their micro batches: a batch begins only if each rank can go through it.

Ranks of a middle stage read nothing, and one copy of the model does not see the data of another. So, before
the first layer, all ranks tell each other how many micro batches they have read, and what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..comm.rank_group import Job
from ..errors import ConfigError, PipelineError

_NONE_WANTED, _FAILED = -1.0, -2.0  # special values in place of a number of micro batches


@dataclass(slots=True)
class Reading:
    """Samples of a batch on one rank."""

    wanted: int  # micro batches; 0 on ranks whose stages read none
    pairs: list[tuple[Any, Any]] = field(default_factory=list)  # inputs and labels
    error: Exception | None = None  # error of the data
    misfit: Exception | None = None  # error of the comparison with other ranks' data

    def take(self, source: Callable[[], Iterator[Any]], make_pair: Callable[[Any], tuple[Any, Any]]) -> None:
        """Read the wanted number of micro batches, or fewer if the data end."""
        try:
            data = source()
            while len(self.pairs) < self.wanted:
                self.pairs.append(make_pair(next(data)))
        except StopIteration:
            pass
        except Exception as error:
            self.error = error

    def check(self, look: Callable[[Any, dict[str, Any]], None]) -> None:
        """Call `look` with each micro batch that was read.

        Order:  that of `look`
        """
        try:
            look((self.pairs,), {})
        except Exception as error:
            self.misfit = error

    def agree(self, job: Job, number: int, line: Sequence[int], device: torch.device) -> list[int]:
        """Return a number for each micro batch: equal numbers mean equal shapes and types of the inputs. The
        first rank of this rank's pipeline, `line`, decides them.

        Order:  a collective of the job
        Errors: on all ranks: StopIteration if the data of all have ended; ConfigError if they have ended
        inside a batch, or on some ranks only; PipelineError if a rank could not read, and on that rank its
        own error
        """
        keys = [_key(inputs) for inputs, _ in self.pairs]
        count = float(len(self.pairs)) if self.wanted else _NONE_WANTED
        own = [_FAILED if self.error or self.misfit else count, *keys, *[0] * (number - len(keys))]
        answers = job.all_gather_numbers(own, device=device, what="the micro batches")
        counts = [int(one[0]) for one in answers]
        if _FAILED in counts:
            self._raise_failure(job, number)
        _check_counts(counts, number, job)
        return [int(key) for key in answers[line[0]][1:]]

    def _raise_failure(self, job: Job, number: int) -> None:
        if self.error is None and self.misfit is None:
            text = ""
        else:
            text = f"{type(self.error or self.misfit).__name__}: {self.error or self.misfit}"
        failures = job.all_gather_objects((self.error is None, text), what="why a micro batch was not read")
        # A rank that could not read is the cause of the misfits on ranks that compare with it.
        is_misfit, rank = min((is_misfit, rank) for rank, (is_misfit, text) in enumerate(failures) if text)
        own = self.misfit if is_misfit else self.error
        if own is not None:
            raise own
        raise PipelineError(
            f"{job.names.of(rank)} cannot take its {number} micro batches, so that no rank begins: "
            f"{failures[rank][1]}"
        )


def _check_counts(counts: Sequence[int], number: int, job: Job) -> None:
    read = {rank: count for rank, count in enumerate(counts) if count >= 0}
    if all(count == number for count in read.values()):
        return
    if not any(read.values()):
        raise StopIteration("the data have ended")
    by_count = [
        f"{count} on {job.names.of(*(rank for rank, one in read.items() if one == count))}"
        for count in sorted(set(read.values()), reverse=True)
    ]
    raise ConfigError(
        f"the data ended in the middle of a batch of {number} micro batches: there were "
        f"{', '.join(by_count)}; the first and the last stage take the same stream, and all copies of the "
        "model streams of one length, gradient_accumulation_steps micro batches for each batch; drop what is "
        "left at their ends"
    )


def _key(inputs: Any) -> int:
    leaves, structure = tree_flatten(inputs)
    said = [(tuple(one.shape), str(one.dtype)) if isinstance(one, Tensor) else type(one) for one in leaves]
    return crc32(f"{structure} {said}".encode())
