"""What a checkpoint can be turned into: files that transformers and torch.load read,
a state_dict, a loaded model.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError, ConfigError
from dslaunch.runtime.checkpoint.export.export import ExportOptions, export
from dslaunch.runtime.checkpoint.export.output_plan import Spec, plan_output, shard_bytes
from dslaunch.runtime.checkpoint.export.progress_bar import ProgressMeter
from dslaunch.runtime.checkpoint.export.source import Source, open_source
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from dslaunch.utils import zero_to_fp32, zero_to_torch
from tests.runtime.models import assert_same_bits, batch, make_config, make_model, train_engine
from tests.runtime.ranks import Ranks

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
FROZEN = "model.layers.0.mlp.up_proj.weight"
SHARD = 15_000  # bytes: several files


def make_qwen() -> Any:
    """Small, with tied ends and biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


Shapes = dict[str, tuple[int, ...]]


class Square(nn.Module):
    """Some parameters, whose squares it adds up."""

    def forward(self) -> Tensor:
        return torch.stack([param.float().square().sum() for param in self.parameters(recurse=False)]).sum()


class Skeleton(nn.Module):
    """A model's parameters by their names, tied as there, without its program: ranks need not load
    transformers to train them.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for step in path:
                if not hasattr(home, step):
                    home.add_module(step, Square())
                home = home.get_submodule(step)
            home.register_parameter(last, nn.Parameter(0.1 * torch.randn(shape, generator=generator)))
        self.lm_head = Square()
        self.lm_head.weight = self.get_parameter(EMBED)
        self.get_parameter(FROZEN).requires_grad_(False)

    def forward(self) -> Tensor:
        owners = [module for module in self.modules() if list(module.parameters(recurse=False))]
        return torch.stack([module() for module in owners]).sum()


TOKENS = torch.arange(24).view(2, 12)


def _masters(engine: Any) -> dict[str, Tensor]:
    """Every parameter's float32 value, whole, on every rank: the master,
    or the parameter where there is none.
    """
    values = {name: value.detach().float() for name, value in engine.state_dict().items()}
    for sub_buffer in engine.optimizer.sub_buffers:
        whole = torch.zeros(sub_buffer.layout.numel)
        start, stop = sub_buffer.layout.shard_range(
            sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
        )
        whole[start:stop] = sub_buffer.optimizer_shard.master
        torch.distributed.all_reduce(whole)
        for member, slot in zip(sub_buffer.members, sub_buffer.layout.slots, strict=True):
            values[member.name] = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
    values[HEAD] = values[EMBED]
    return values


def _save(rank: int, folder: str, shapes: Shapes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint, and weights by save_16bit_model() in each of its forms;
    return both precisions of the weights.
    """
    config = make_config(stage=3, bf16={"enabled": True}, reduce_bucket_size=20_000)
    engine: Any = dslaunch.initialize(model=Skeleton(shapes), config=config)[0]
    for _ in range(2):
        engine.backward(engine())
        engine.step()
    root = Path(folder)
    engine.save_checkpoint(root / "checkpoints")
    engine.save_16bit_model(root / "one", "model.safetensors")
    engine.save_16bit_model(root / "many", "model.safetensors", max_shard_size=SHARD)
    engine.save_16bit_model(root / "bins", max_shard_size="12KB")
    engine.save_16bit_model(root / "trained", "model.safetensors", True)
    with pytest.raises(CheckpointError, match="max_shard_size '5 apples' is no size"):
        engine.save_16bit_model(root / "many", "model.safetensors", max_shard_size="5 apples")
    (root / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/model\.safetensors cannot be written"):
        engine.save_16bit_model(root / "file", "model.safetensors")
    return _masters(engine), {name: value.clone() for name, value in engine.state_dict().items()}


class Saved:
    """What `_save` left."""

    def __init__(self, folder: Path, masters: dict[str, Tensor], params: dict[str, Tensor]) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.masters, self.params = masters, params


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    shapes = {name: tuple(param.shape) for name, param in make_qwen().named_parameters()}
    return Saved(folder, *ranks(_save, str(folder), shapes, world_size=2)[0])


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a folder, as the index or the one file has them."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        held = load_file(folder / file)
        assert {name for name, home in index["weight_map"].items() if home == file} == set(held)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= SHARD
        found |= held
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found


def without(state: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


# ---- exports


@pytest.mark.slow
def test_transformers_loads_an_export_without_a_word_and_computes_the_same(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Qwen2ForCausalLM
    from transformers.utils import logging as hf_logging

    reference = make_qwen()
    reference.load_state_dict(saved.masters)
    hf_logging.enable_propagation()  # to caplog
    source = open_source(saved.checkpoints)
    for file_name, size in (
        ("model.safetensors", SHARD),
        ("model.safetensors", None),
        ("pytorch_model.bin", SHARD),
    ):
        out = tmp_path / f"{file_name}-{size}"
        plan = export(source, out, ExportOptions(file_name=file_name, max_shard_size=size))
        assert (len(plan.files) > 2) == (size is not None)
        reference.config.save_pretrained(out)
        loaded, info = Qwen2ForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_same_bits(dict(loaded.state_dict()), saved.masters)
        with torch.no_grad():
            assert torch.equal(loaded(TOKENS).logits, reference(TOKENS).logits)
    hf_logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_masters_are_exported_as_float32_to_the_bit_and_tied_ones_once(saved: Saved, tmp_path: Path) -> None:
    plan = export(open_source(saved.checkpoints), tmp_path, ExportOptions(max_shard_size=SHARD))
    assert plan.aliases == {HEAD: EMBED}
    assert_same_bits(load_folder(tmp_path), without(saved.masters, HEAD))
    assert sorted(os.listdir(tmp_path)) == sorted([*(file.name for file in plan.files), plan.index_name])
    home = next(file.name for file in plan.files if EMBED in file.specs)
    with safe_open(tmp_path / home, "pt") as file:
        assert file.metadata() == {"format": "pt", HEAD: EMBED}
    (tmp_path / ".model-00007-of-00009.safetensors.partial").touch()  # of an export that was killed
    # Then one file: those of before, which a loader would take first, or mix in, are gone.
    (tmp_path / "config.json").write_text("{}")
    export(open_source(saved.checkpoints), tmp_path, ExportOptions())
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_conversion_that_was_killed_does_not_stop_the_next(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / ".pytorch_model.bin.partial").touch()  # as older versions left it
    (tmp_path / ".export-01234567.partial").mkdir()
    (tmp_path / ".export-01234567.partial" / "pytorch_model.bin").touch()
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(saved.checkpoints, tmp_path)
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    assert_same_bits(torch.load(tmp_path / "pytorch_model.bin"), saved.masters)


def _convert(rank: int, checkpoints: str, out: str) -> None:
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(checkpoints, out, max_shard_size=SHARD)


def test_two_ranks_convert_into_the_same_folder_at_once(ranks: Ranks, saved: Saved, tmp_path: Path) -> None:
    ranks(_convert, str(saved.checkpoints), str(tmp_path), world_size=2)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    files = set(index["weight_map"].values())
    assert sorted(os.listdir(tmp_path)) == sorted({*files, "pytorch_model.bin.index.json"})
    found = {name: value for file in files for name, value in torch.load(tmp_path / file).items()}
    assert_same_bits(found, saved.masters)


def test_16_bits_are_those_that_the_model_trained_with(saved: Saved, tmp_path: Path) -> None:
    export(open_source(saved.checkpoints), tmp_path, ExportOptions(dtype=torch.bfloat16))
    assert_same_bits(load_folder(tmp_path), without(saved.params, HEAD))


def test_save_16bit_model_writes_the_same_in_every_form(saved: Saved) -> None:
    for name in ("one", "many"):
        assert_same_bits(load_folder(saved.folder / name), without(saved.params, HEAD))
    assert len(os.listdir(saved.folder / "many")) > 2
    assert_same_bits(load_folder(saved.folder / "trained"), without(saved.params, HEAD, FROZEN))
    index = json.loads((saved.folder / "bins" / "pytorch_model.bin.index.json").read_text())
    files = {
        file: torch.load(saved.folder / "bins" / file) for file in sorted(set(index["weight_map"].values()))
    }
    assert len(files) > 2
    assert_same_bits({name: files[file][name] for name, file in index["weight_map"].items()}, saved.params)
    tied = files[index["weight_map"][HEAD]]
    assert tied[HEAD].data_ptr() == tied[EMBED].data_ptr()


# ---- DeepSpeed's functions and script


def test_a_state_dict_of_float32_has_all_names(saved: Saved) -> None:
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved.checkpoints)
    assert_same_bits(state, saved.masters)
    assert state[HEAD] is state[EMBED]
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        str(saved.checkpoints), tag="global_step2", exclude_frozen_parameters=True, lazy_mode=True
    )
    assert lazy[HEAD].shape == (97, 24)
    assert lazy[HEAD].dtype is torch.float32
    read = {name: value.contiguous() for name, value in lazy.items()}
    assert_same_bits(read, without(saved.masters, FROZEN))


def test_files_are_written_in_the_dtype_that_is_named(saved: Saved, tmp_path: Path) -> None:
    cases = (("BF16", torch.bfloat16), ("torch.float16", torch.float16), (torch.float32, torch.float32))
    for given, dtype in cases:
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(saved.checkpoints, tmp_path, given)
        found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        assert_same_bits(found, {name: value.to(dtype) for name, value in saved.masters.items()})
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(saved.checkpoints, tmp_path / "other", None, True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"dtype='int8'\): must be one of float32, fp32, float16"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(saved.checkpoints, tmp_path, "int8")


def test_weights_are_loaded_into_a_plain_model(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    class Other(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.norm = nn.Linear(width, 1, bias=False)
            self.mine = nn.Linear(1, 1, bias=False)

    model = make_qwen()
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, saved.checkpoints) is model
    assert_same_bits(dict(model.state_dict()), saved.masters)
    assert caplog.records == []
    with pytest.raises(CheckpointError, match=r"size mismatch for model\.norm\.weight"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(Other(5), saved.checkpoints)


def _load_into_engine(rank: int, folder: str) -> None:
    """The recipe of DeepSpeed's and Hugging Face's documents, after training; rank 1 does it alone."""
    model = make_model()
    config = make_config(stage=3, bf16={"enabled": True})
    engine = dslaunch.initialize(model=model, config=config)[0]
    train_engine(engine, steps=1, dtype=torch.bfloat16)
    engine.save_checkpoint(folder)
    train_engine(engine, steps=1, dtype=torch.bfloat16)
    part = next(iter(model.children()))
    with pytest.raises(CheckpointError, match="was given a part of an engine's module, without 'blocks"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(part, folder)
    saved = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    if rank == 1:
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, folder) is model
        assert_same_bits({name: param.detach() for name, param in model.named_parameters()}, saved)
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
        assert not any(hasattr(param, "ds_id") for param in model.parameters())
        assert torch.isfinite(model(batch(0))).all()
        with pytest.raises(ConfigError, match=r"came after load_state_dict_from_zero_checkpoint\(\)"):
            engine(batch(0))
    torch.distributed.barrier()
    if rank == 0:
        zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, folder)
    again = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    assert_same_bits(again.state_dict(), saved)
    train_engine(again, steps=1)


def test_the_module_of_an_engine_at_stage_3_is_whole_again_with_a_checkpoints_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_load_into_engine, str(tmp_path), world_size=2)


@pytest.mark.slow
def test_the_script_beside_latest_converts(saved: Saved, tmp_path: Path) -> None:
    script = saved.checkpoints / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)

    done = subprocess.run(
        [sys.executable, str(script), ".", str(tmp_path), "--max_shard_size", "20KB", "-t", "global_step2"],
        cwd=saved.checkpoints,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/pytorch_model.bin.index.json: ")
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert set(index) == set(saved.params)


def test_the_scripts_command_line(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(saved.checkpoints), str(tmp_path), "--safe_serialization", "--exclude_frozen_parameters"]
    zero_to_fp32.main(words)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/model.safetensors: 1 file, ")
    assert_same_bits(load_folder(tmp_path), without(saved.masters, HEAD, FROZEN))
    with pytest.raises(SystemExit) as ended:
        zero_to_fp32.main([*words, "-t", "global_step3"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "global_step3 is no checkpoint" in said.err
    with pytest.raises(CheckpointError, match="global_step3 is no checkpoint"):
        zero_to_fp32.main([*words, "-t", "global_step3", "-d"])


def test_the_other_script_is_told_the_dtype(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = saved.checkpoints / "zero_to_torch.py"
    assert os.access(script, os.X_OK)
    places = [str(saved.checkpoints), str(tmp_path)]
    exec(script.read_text(), {"__name__": "not main"})  # it imports what it needs
    zero_to_torch.main([*places, "--dtype", "bf16"])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/pytorch_model.bin: 1 file, ")
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_same_bits(found, {name: value.bfloat16() for name, value in saved.masters.items()})
    for words, said in (([], "required: --dtype"), (["--dtype", "int8"], "invalid choice: 'int8'")):
        with pytest.raises(SystemExit) as ended:
            zero_to_torch.main([*places, *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


# ---- other contents than a model's


class InMemory(Source):
    """Tensors that another program holds."""

    where, tag = "memory", "tag"

    def __init__(self, tensors: dict[str, Tensor], aliases: dict[str, str] | None = None) -> None:
        self._tensors, self._aliases = tensors, aliases or {}

    def names(self) -> dict[str, Spec]:
        return {name: Spec(tuple(value.shape), value.dtype) for name, value in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def aliases(self) -> dict[str, str]:
        return self._aliases

    def frozen(self) -> frozenset[str]:
        return frozenset(self._tensors) if "all" in self._tensors else frozenset()


MIXED = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "flags": torch.tensor([[True, False, True]]),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
    "count": torch.tensor([1, 2, 3]),
    "transposed": torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
}


@pytest.mark.parametrize("size", [None, 16])
def test_every_dtype_and_shape_is_read_back_by_the_library(tmp_path: Path, size: int | None) -> None:
    plan = export(InMemory(MIXED), tmp_path, ExportOptions(dtype=torch.float64, max_shard_size=size))
    found: dict[str, Tensor] = {}
    for file in plan.files:
        found |= load_file(tmp_path / file.name)
        data = (tmp_path / file.name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":  # it can be mapped into memory
                assert entry["data_offsets"][0] % found[name].itemsize == 0
    expected = {name: value.double() if value.is_floating_point() else value for name, value in MIXED.items()}
    assert_same_bits(found, expected)
    assert all(found[name].dtype == value.dtype for name, value in expected.items())


def test_what_float16_cannot_hold_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    source = InMemory({"fine": torch.tensor([1.0, float("inf")]), "large": torch.tensor([1.0, -7e4])})
    with pytest.raises(CheckpointError) as caught:
        export(source, tmp_path, ExportOptions(dtype=torch.float16, max_shard_size=4))
    assert str(caught.value).startswith("large has numbers up to 70000, and float16 ends at 65504")
    assert os.listdir(tmp_path) == []


def test_refusals(tmp_path: Path) -> None:
    def said(*args: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            export(*args)
        return str(caught.value)

    (tmp_path / "file").touch()
    a = {"a": torch.ones(1)}
    assert said(InMemory(a), tmp_path / "file", ExportOptions()).startswith(
        f"{tmp_path}/file/model.safetensors cannot be written: "
    )
    assert "16 is no size" in said(InMemory(a), tmp_path, ExportOptions(max_shard_size=-16))
    assert said(InMemory({}), tmp_path, ExportOptions()) == "memory holds no weights"
    frozen = ExportOptions(exclude_frozen_parameters=True)
    assert said(InMemory({"all": torch.ones(1)}), tmp_path, frozen).startswith(
        "memory holds no weights that were trained"
    )
    complex128 = InMemory({"a": torch.ones(1, dtype=torch.complex128)})
    assert "a is of torch.complex128, which safetensors has no word for" in said(
        complex128, tmp_path, ExportOptions()
    )
    with pytest.raises(CheckpointError, match="nothing/latest does not exist"):
        open_source(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("size", "expected"),
    [(None, None), (17, 17), ("17", 17), ("5GB", 5 * 10**9), ("2 MiB", 2 << 20), ("3kb", 3000)],
)
def test_sizes(size: Any, expected: int | None) -> None:
    assert shard_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "0", "1.5GB", "5XB", "5IB", -1])
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(CheckpointError, match="is no size; write"):
        shard_bytes(size)


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own() -> None:
    specs = {name: Spec((numel,), torch.float32) for name, numel in (("a", 2), ("b", 9), ("c", 1), ("d", 2))}
    plan = plan_output(specs, aliases={}, file_name="w.safetensors", max_shard_size=12)
    assert [(file.name, list(file.specs)) for file in plan.files] == [
        ("w-00001-of-00003.safetensors", ["a"]),
        ("w-00002-of-00003.safetensors", ["b"]),
        ("w-00003-of-00003.safetensors", ["c", "d"]),
    ]
    stale = ["w.safetensors", "w-00001-of-00002.safetensors", "w-00004-of-00004.safetensors"]
    kept = ["w.bin", "w-1.safetensors", "ww.safetensors", "w.safetensors.index.json", plan.files[0].name]
    assert [plan.is_stale(name) for name in stale] == [True, True, True]
    assert [plan.is_stale(name) for name in kept] == [False] * 5


def test_a_url_is_as_good_as_a_folder(saved: Saved) -> None:
    import fsspec

    plan = export(open_source(saved.checkpoints), "memory://out/here", ExportOptions(max_shard_size=SHARD))
    fs = fsspec.filesystem("memory")
    held = {path.rsplit("/", 1)[-1] for path in fs.ls("/out/here", detail=False)}
    assert held == {file.name for file in plan.files} | {plan.index_name}
    export(open_source(saved.checkpoints), "memory://out/here", ExportOptions(file_name="m.safetensors"))
    export(open_source(saved.checkpoints), "memory://out/here", ExportOptions())
    held = {path.rsplit("/", 1)[-1] for path in fs.ls("/out/here", detail=False)}
    assert held == {"m.safetensors", "model.safetensors"}
    with fs.open("/out/here/model.safetensors", "rb") as file, io.BytesIO(file.read()) as data:
        from safetensors.torch import load

        assert_same_bits(load(data.getvalue()), without(saved.masters, HEAD))


# ---- memory


NUM_TENSORS, TENSOR_BYTES = 24, 16 << 20
# Three buffers of 16 MiB of the file that is written, a box of at most a tensor (read, then loaded), a
# tensor, and what is small. Seen: 96 MiB, and 112.2 where the disk is slow.
AT_MOST_BYTES = 3 * (16 << 20) + 3 * TENSOR_BYTES + (16 << 20) + (4 << 20)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(NUM_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def _export_with_peak(rank: int, folder: str) -> tuple[int, int]:
    with torch.device("meta"):
        model = Wide()
    engine: Any = dslaunch.initialize(
        model=model.to_empty(device="cpu"),
        config=make_config(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    )[0]
    for param in model.parameters():
        param.data.fill_(1.0)
    engine.save_checkpoint(folder)
    engine.destroy()
    source = open_source(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    plan = export(source, Path(folder) / "out", ExportOptions())
    return _status("VmHWM") - before, plan.num_bytes


def _status(key: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.slow
def test_an_export_holds_a_tensor_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    peak_bytes, num_bytes = ranks(_export_with_peak, str(tmp_path), world_size=1)[0]
    assert num_bytes == NUM_TENSORS * TENSOR_BYTES
    assert peak_bytes <= AT_MOST_BYTES


# ---- how far it is


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(stream: io.StringIO, times: list[float]) -> str:
    now = iter([0.0, *times, 99.0])
    with ProgressMeter("export", 4 * 10**9, stream=stream, clock=lambda: next(now)) as meter:
        for _ in times:
            meter.advance(10**9)
    return stream.getvalue()


def test_work_that_takes_long_shows_how_far_it_is() -> None:
    assert _shown(io.StringIO(), [0.5, 1.0, 1.9]) == ""
    assert _shown(Terminal(), [0.5, 1.0, 1.9]) == ""
    assert _shown(io.StringIO(), [1.0, 4.0, 5.0]) == "export: 2.00 of 4.00 GB, 0.50 GB/s, 4 s left\n"
    bar = _shown(Terminal(), [1.0, 4.0, 5.0])
    assert bar.startswith(
        "\r[###############               ] export: 2.00 of 4.00 GB, 0.50 GB/s, 4 s left\r[#"
    )
    assert bar.endswith(" 99.00 GB\n") is False
    assert bar.count("\n") == 1


def test_tags_and_their_folders_are_found(saved: Saved) -> None:
    for where, tag in (
        (saved.checkpoints, None),
        (saved.checkpoints, "global_step2"),
        (saved.checkpoints / "global_step2", None),
        (f"file://{saved.checkpoints}", None),
    ):
        source = open_source(where, tag)
        assert source.tag == "global_step2"
        assert source.names().keys() == without(saved.params, HEAD).keys()
        assert source.frozen() == {FROZEN}
    assert open_store(saved.checkpoints).tags() == ["global_step2"]
