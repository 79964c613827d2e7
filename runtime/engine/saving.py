"""Calls of a training loop to save and load: checkpoints of a training, and weights for other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..checkpoint.export.output_plan import shard_bytes
from ..errors import CheckpointError, ConfigError
from ..weights.file_names import match_files
from .checkpoints import Checkpoints
from .instruments import Instruments
from .weights import Weights


class Saving(nn.Module):
    """DeepSpeed's methods to save and load, which `Checkpoints` and `Weights` implement."""

    _checkpoints: Checkpoints
    _instruments: Instruments
    _weights: Weights

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir`/`tag`, default global_step<n>, whole or not at all; return True.

        See "One checkpoint" in checkpoint/files/format.py.

        `save_dir` is a folder that all ranks see, or a URL that fsspec opens. With `checkpoint.async_save`
        this returns when training may go on; a failure is then raised by the next step().
        Order:  every rank must call this
        Errors: CheckpointError if it cannot be written, or `client_state` holds other than
                plain data and tensors
        """
        self._checkpoints.save(
            save_dir,
            tag,
            client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from `load_dir`/`tag`; return its path and its client_state.

        Any stage and any number of ranks may have written it.

        Without a tag, load the checkpoint that `latest` names, or, if it is damaged, the newest undamaged
        one, with a warning. If the launcher restarts failed jobs (--max_restarts), a folder without a
        checkpoint is no error, and (None, {}) is returned. For programs written for DeepSpeed (`is_lenient`),
        a folder without `latest` is no error either: return (None, None), with a warning. Gradients that wait
        for a step are dropped, with a warning, because they belong to the earlier state.
        `custom_load_fn(src=state_dict, dst=module)` loads the weights in place of the engine; every rank then
        has all weights in memory.
        Order:  every rank must call this
        Errors: CheckpointError if there is none, or it does not fit the model
        """

        def take_module(state: dict[str, Any]) -> None:
            self.load_module_state_dict({"module": state}, custom_load_fn=custom_load_fn)

        return self._checkpoints.load(
            load_dir,
            tag,
            strict=load_module_strict,
            module_only=load_module_only,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
            take_module=None if custom_load_fn is None else take_module,
        )

    def resume(
        self,
        folder: str | Path | None = None,
        client_state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Go on from the newest state that there is: a snapshot in the memory of the hosts, which a job with
        --snapshot_every has after a failure, or the checkpoint in `folder`, as load_checkpoint() takes it.
        Return its client_state; {} if there is neither, and training begins.

        `client_state` is called for each snapshot, and returns what the program wants to have back of its
        own, as save_checkpoint() is given it. A damaged state is passed over with a warning for the one
        before. Without --snapshot_every only the folder counts.
        Order:  every rank must call this
        Errors: CheckpointError if what there is does not fit the model
        """
        return self._checkpoints.resume(folder, client_state)

    def load_weights(self, folder: str | Path, *, strict: bool = True) -> None:
        """Load the weights alone of a folder, each rank only what it keeps of them.

        The folder is one of transformers' format, as save_pretrained() and save_16bit_model() write it and
        snapshot_download() of huggingface_hub returns it: model.safetensors or pytorch_model.bin, or several
        files with an index. Names and tensors are converted as from_pretrained() does it, and rounded to the
        model's dtypes; float32 masters of an optimizer get what is in the files. A folder that
        save_checkpoint() of dslaunch or DeepSpeed wrote is taken as load_checkpoint(load_module_only=True)
        takes it. Optimizer states, counters and adapters of PEFT stay as they are.
        A model may be made on the meta device (`with torch.device("meta")`) and given to initialize(): it has
        no values until this.
        `strict` False takes what both have, and names the rest in a warning.
        Order:  every rank must call this, with a folder of the same files
        Errors: CheckpointError, on every rank and before anything is changed, for files that are missing or
                damaged, or names or shapes that do not fit
        """
        self._checkpoints.load_weights(folder, strict=strict, match_of=match_files)

    def state_dict(  # type: ignore[override]  # it gives copies of all
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the module's state_dict; where parameters are sharded, with copies of all of
        them on every rank.

        Order: a collective where parameters are sharded
        """
        return self._weights.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the module, and into the optimizer's float32 masters where there are any.

        Order:  a collective
        Errors: torch's on its rank, CheckpointError on others; then nothing is loaded on any.
                ConfigError for `assign`
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace parameters that lie in flat buffers; leave "
                "assign out, and the values are copied into them"
            )
        return self._weights.load_state_dict(state_dict, strict)

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return `state_dict()`, on request without the parameters that need no gradient.

        Order: a collective where parameters are sharded
        """
        state = self.state_dict(*args, **kwargs)
        left_out = self._weights.frozen() if exclude_frozen_parameters else set()
        return {name: value for name, value in state.items() if name not in left_out}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Iterable[nn.Parameter] | None = None,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Load `checkpoint["module"]`; `custom_load_fn(src=state, dst=module)` does it instead of
        load_state_dict(). In a strict load the `allowed_missing_keys` may be missing. Sharded parameters are
        always fetched, whatever the arguments say.

        Order:  a collective where parameters are sharded; every rank gives the same weights
        Errors: CheckpointError if there is no "module" in it
        """
        if "module" not in checkpoint:
            shown = ", ".join(map(str, islice(checkpoint, 4))) or "nothing"
            more = f" and {len(checkpoint) - 4} more" if len(checkpoint) > 4 else ""
            raise CheckpointError(
                f"load_module_state_dict() was given {shown}{more}, but the weights belong under "
                '"module"; for a plain state_dict call engine.load_state_dict()'
            )
        if custom_load_fn is None:
            self._weights.load_state_dict(checkpoint["module"], strict, may_miss=allowed_missing_keys or ())
        else:
            self._weights.load_by(custom_load_fn, checkpoint["module"])

    def weights(
        self,
        names: Literal["module", "hf"] | Callable[[str], str | None] = "module",
        *,
        merge_lora: bool = False,
        only_trainable: bool = False,
        to: Literal["all", "first"] = "all",
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the names and the whole tensors of the model's weights, in its dtypes: for a server
        that generates, or for another format of files.

        `names`: "module", those of the module's state_dict; "hf", those that transformers' from_pretrained()
        reads, with fused experts as they are in files and without PEFT's prefixes; or a function from a name
        of the module to another one, or to None for a tensor that is left out. `merge_lora`: layers of PEFT
        come with their adapters merged, under the base model's names. `only_trainable`: only parameters that
        need a gradient; with "hf", adapters as PEFT saves them.
        `to`: "all" ranks, or the "first", where others get no tensors and have to iterate all the same.

        One unit is gathered at a time, from the shards of parameters alone, and the parameters stay as they
        are. A tensor is contiguous, on the engine's device, and has the values until the next one is asked
        for: copy what you keep, and write to none. A tied tensor comes once, under its first name. A rank
        that leaves the loop early does the others' collectives to the end.
        Order:  a collective: every rank iterates to the end, and calls nothing else of the engine meanwhile
        Errors: ConfigError, on all ranks and before anything is sent, for names that cannot be given
        """
        naming = self._weights.naming(names, merges=merge_lora, only_trainable=only_trainable)
        left_out = self._weights.not_trained() if only_trainable else set()
        return self._weights.one_pass(naming, left_out=left_out, to=to)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write the weights, in the model's dtypes, for a plain module or transformers' from_pretrained().

        Return True.

        - One file of torch.save by default: rank 0 has all of it in host memory.
        - `save_filename` ends in .safetensors: unit after unit is written as it arrives, and several files
          with an index where there is more than `max_shard_size`, default 5GB. A tied parameter is there
          once, as transformers writes it.
        - Another name with `max_shard_size`: files of torch.save with an index;
          rank 0 has one of them in host memory.

        Rank 0 writes, whole or not at all; devices hold a unit more than usual.
        Order:  every rank must call this
        Errors: CheckpointError, on every rank, if it cannot be written
        """
        shard_bytes(max_shard_size)  # checked before any message, so that all ranks raise the same error
        left_out = self._weights.frozen() if exclude_frozen_parameters else set()
        with self._instruments.state("saving"):
            self._weights.save(save_dir, save_filename, left_out=left_out, max_shard_size=max_shard_size)
        return True
