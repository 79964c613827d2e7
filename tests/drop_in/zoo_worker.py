"""Makes models of transformers at stage 3 in the ways that programs have, trains and saves each; test_zoo.py
says what must come out.

Arguments: folder, cases: a model type, or "part 1 of 8" of all.
"""

from __future__ import annotations

import gc
import random
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import zoo
from cases import main, rank, wait, world_size
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging

STEPS = 2
WAYS = ("from_config", "from_pretrained", "zero.Init")
ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0}  # eps in the order of gradients: no jump at their sign
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": zoo.BATCH,
    "optimizer": {"type": "AdamW", "params": ADAMW},
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 50,
        "stage3_prefetch_bucket_size": 50,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
# Their __init__ initializes while transformers has replaced torch's functions, which asks a parameter's class
# before it comes to the replacement: a parameter that is sharded by then is drawn later.
DRAWN_OTHERWISE = ("vit_mae",)
Values = dict[str, Tensor]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # what transformers draws its masks with
    random.seed(number)


def _config(kind: str) -> Any:
    config = zoo.config_of(kind)
    for one in (config, config.get_text_config()):
        if getattr(one, "use_cache", False):
            one.use_cache = False
    return config


def _make(kind: str, way: str, folder: Path, *, is_sharded: bool, **options: Any) -> Any:
    """Make a model in one of the ways, at stage 3 or plainly."""
    made = zoo.class_of(zoo.classes()[kind])
    config = _config(kind)
    # With a ds_config transformers draws the values of from_config() in another order.
    has_ds_config = way == "from_config" or (is_sharded and way == "from_pretrained")
    keep = HfDeepSpeedConfig(DS_CONFIG) if has_ds_config else None
    init = partial(deepspeed.zero.Init, enabled=is_sharded)
    _seed(0)
    try:
        if way == "from_pretrained":
            return made.from_pretrained(folder, **options)
        if way == "zero.Init":
            with init(config_dict_or_path=DS_CONFIG):
                return made(config)
        with patch.object(deepspeed.zero, "Init", init):
            model = made._from_config(config)
        if not is_sharded:  # rank 0 has drawn them, alone
            for param in model.parameters():
                dist.broadcast(param.detach(), 0)
        return model
    finally:
        del keep
        unset_hf_deepspeed_config()


@contextmanager
def _memory_of_nan() -> Iterator[None]:
    """Let what is not initialized be NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills such memory then
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _values(model: PreTrainedModel) -> Values:
    params = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


def _unlike(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of what is not the same to the bit, or not there."""
    return [
        name
        for name in sorted({*values, *expected})
        if name not in values or name not in expected or not torch.equal(values[name], expected[name])
    ]


def _loss(model: Any, inputs: Mapping[str, Any], seed: int) -> Tensor:
    _seed(seed)
    return zoo.loss_of(model(**inputs))


def _train_plain(model: PreTrainedModel) -> tuple[list[float], list[float], Values]:
    """Train on what all ranks have; return this rank's losses, the norms, and the parameters."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(world_size()):
            seed = 10 * step + one
            loss = _loss(model, zoo.inputs_for(model, seed=seed), seed)
            (loss / world_size()).backward()
            losses += [float(loss.detach())] if one == rank() else []
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
    return losses, norms, {name: param.detach().clone() for name, param in model.named_parameters()}


def _train(model: PreTrainedModel) -> tuple[Any, list[float], list[float]]:
    if model.supports_gradient_checkpointing:
        with suppress(ValueError):  # a few say that they support it, and have no such module
            model.gradient_checkpointing_enable()
    model.train()
    engine, *_ = deepspeed.initialize(model=model, config=DS_CONFIG)
    losses, norms = [], []
    for step in range(STEPS):
        seed = 10 * step + rank()
        loss = _loss(engine, zoo.inputs_for(model, seed=seed), seed)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    return engine, losses, norms


def _save(engine: Any, folder: Path) -> dict[str, list[str]]:
    """Save what was trained in two ways; return what is not the same when it is read again."""
    trained = _values(engine.module)
    engine.save_16bit_model(str(folder / "16bit"), "pytorch_model.bin")
    state = engine._zero3_consolidated_16bit_state_dict()
    if rank() == 0:
        engine.module.save_pretrained(folder / "trained", state_dict=state)
    wait()
    if rank():
        return {}
    read = torch.load(folder / "16bit" / "pytorch_model.bin")
    again = type(engine.module).from_pretrained(folder / "trained")
    return {
        "save_16bit_model": _unlike({name: read[name] for name in trained if name in read}, trained),
        "save_pretrained": _unlike(dict(again.named_parameters()), trained),
    }


def _worst(values: list[float], expected: list[float]) -> float:
    """Return the greatest difference, as a part of what is expected."""
    pairs = zip(values, expected, strict=True)
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def run(kind: str, folder: Path) -> dict[str, Any]:
    """Return what is not as with plain torch: names, and the greatest differences; and where it stopped."""
    found: dict[str, Any] = {"class": zoo.classes()[kind], "stage": "plain"}
    try:
        _run(kind, folder / kind, found)
        found["stage"] = "done"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
        if found["stage"] != "plain":
            found["traceback"] = traceback.format_exc()
            print(kind, rank(), found["traceback"], flush=True)  # if the other rank waits now
    shutil.rmtree(folder / kind / "trained", ignore_errors=True)
    unset_hf_deepspeed_config()
    gc.collect()
    wait()
    return found


def _run(kind: str, folder: Path, found: dict[str, Any]) -> None:
    plain = _make(kind, "zero.Init", folder, is_sharded=False)
    num_elements = sum(param.numel() for param in plain.parameters())
    if num_elements > zoo.LARGE:
        raise ValueError(f"it has {num_elements} parameters")
    way = WAYS[crc32(kind.encode()) % len(WAYS)]
    if rank() == 0:
        plain.save_pretrained(folder)
        found["in file"] = list(load_file(folder / "model.safetensors"))
        found["in model"] = [name for name, _ in plain.named_parameters()]
    wait()
    with _memory_of_nan():
        expected = {one: _values(_make(kind, one, folder, is_sharded=False)) for one in WAYS}
    # With a ds_config from_config() of transformers leaves some as the memory was.
    found["uninitialized"] = [name for name, value in expected["from_config"].items() if value.isnan().any()]
    if found["uninitialized"] or kind in DRAWN_OTHERWISE:
        way = "from_pretrained"
    reference = _make(kind, way, folder, is_sharded=False)
    for one, other in zip(reference.parameters(), plain.parameters(), strict=True):
        one.requires_grad_(
            other.requires_grad
        )  # without a ds_config from_pretrained() forgets what is frozen
    losses, norms, trained = _train_plain(reference)
    found["way"] = way
    for one in (*(one for one in WAYS if one != way), way):
        found["stage"] = one
        model = _make(kind, one, folder, is_sharded=True)
        unlike = _unlike(_values(model), expected[one])
        left_out = found["uninitialized"] if one == "from_config" else []
        found[one] = [name for name in unlike if name not in left_out]
        if one == "from_config" and kind in DRAWN_OTHERWISE:
            found[one] = []
        found[f"{one}, whole"] = [
            name for name, param in model.named_parameters() if param.numel() and not hasattr(param, "ds_id")
        ]
    found["stage"] = "train"
    engine, own_losses, own_norms = _train(model)
    found["loss"], found["norm"] = _worst(own_losses, losses), _worst(own_norms, norms)
    found["largest norm"] = max(norms)
    values = _values(engine.module)
    found["parameter"] = max(
        float((values[name] - other).abs().max()) for name, other in trained.items() if other.numel()
    )
    found["stage"] = "save"
    found |= _save(engine, folder)
    engine.destroy()


def run_part(part: int, num_parts: int, folder: Path) -> dict[str, Any]:
    """Run every `num_parts`th model type."""
    return {kind: run(kind, folder) for kind in list(zoo.classes())[part - 1 :: num_parts]}


def lose(kind: str, lost: str, folder: Path) -> dict[str, Any]:
    """Load a file from which all is missing that fits the pattern `lost`; return what transformers says is
    missing, what was read wrongly, and which of the missing ones hold no numbers.
    """
    folder = folder / f"{kind} without {lost}"
    if rank() == 0:
        _make(kind, "zero.Init", folder, is_sharded=False).save_pretrained(folder)
        file = folder / "model.safetensors"
        kept = {name: value for name, value in load_file(file).items() if not re.search(lost, name)}
        save_file(kept, file, metadata={"format": "pt"})
    wait()
    plain = _attempt(kind, folder, is_sharded=False)
    found = _attempt(kind, folder, is_sharded=True)
    if isinstance(plain, str) or isinstance(found, str):
        return {"plain": str(plain), "found": str(found)}
    (expected, expected_missing), (values, missing) = plain, found
    return {
        "missing": missing,
        "expected": expected_missing,
        "read wrongly": [name for name in _unlike(values, expected) if name not in missing],
        "unwritten": [
            name
            for name in missing
            if not values[name].isfinite().all() or bool(values[name].any()) != bool(expected[name].any())
        ],
    }


def _attempt(kind: str, folder: Path, *, is_sharded: bool) -> tuple[Values, list[str]] | str:
    """Return what is read, and what is missing; or the error."""
    try:
        model, info = _make(kind, "from_pretrained", folder, is_sharded=is_sharded, output_loading_info=True)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return _values(model), sorted(info["missing_keys"])


def _cases() -> dict[str, Callable[[Path], dict[str, Any]]]:
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {kind: partial(run, kind) for kind in zoo.classes()}
    for name in sys.argv[2:]:
        if found := re.fullmatch(r"part (\d+) of (\d+)", name):
            cases[name] = partial(run_part, int(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\S+) without (.*)", name):
            cases[name] = partial(lose, found[1], found[2])
    return cases


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    main(_cases())
