"""A model in place of the program: its ds_config is the program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.model import ds_config_of, model_request, with_ds_config


@pytest.mark.parametrize(
    ("words", "found", "made"),
    [
        (
            "--deepspeed --deepspeed_config ds.json --lr 1",
            "ds.json",
            "--deepspeed --deepspeed_config x --lr 1",
        ),
        ("--deepspeed_config=ds.json", "ds.json", "--deepspeed_config=x"),
        ("--bf16 --deepspeed ds.json", "ds.json", "--bf16 --deepspeed x"),  # as the Trainer's programs
        ("--deepspeed=ds.json", "ds.json", "--deepspeed=x"),
    ],
)
def test_the_ds_config_of_a_program_is_found_and_replaced(words: str, found: str, made: str) -> None:
    assert ds_config_of(words.split()) == found
    assert with_ds_config(words.split(), "x") == tuple(made.split())


def test_quantized_weights_are_refused_by_name(folder: Path) -> None:
    text = '{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}'
    (folder / "config.json").write_text(text)
    with pytest.raises(LaunchError, match=r"its weights are quantized \(quantization_config, bitsandbytes\)"):
        model_request(
            str(folder),
            "4x8",
            is_checkpointed=False,
            arguments=("--deepspeed_config=ds.json",),
            cwd=str(folder),
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "twice.json").write_text('{"a": 1, "a": 2}')
    return tmp_path


def test_a_model_is_planned_with_the_ds_config_that_the_script_gets(folder: Path) -> None:
    made = model_request(
        str(folder),
        "4x2048",
        is_checkpointed=True,
        arguments=("--deepspeed", "--deepspeed_config", "ds.json"),
        cwd=str(folder),
    )
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    assert made == {"model": str(folder), "batch": "4x2048", "config": config, "is_checkpointed": True}
    assert ds_config_of(("--deepspeed_config=ds.json",)) == "ds.json"


@pytest.mark.parametrize(
    ("model", "batch", "arguments", "message"),
    [
        (
            "nosuch",
            "4x2048",
            ("--deepspeed_config", "ds.json"),
            "there is no such file; give a folder with a",
        ),
        (".", "4", ("--deepspeed_config", "ds.json"), "--batch=4: it must be samples and tokens of a micro"),
        (".", "4x2048", ("--deepspeed_config",), "the arguments of the script name no ds_config; write"),
        (".", "4x2048", ("--deepspeed_config=x.json",), "it cannot be read (No such file or directory)"),
        (".", "4x2048", ("--deepspeed_config=twice.json",), "--deepspeed_config twice.json: a: given more"),
    ],
)
def test_mistakes_say_what_to_give(
    model: str, batch: str, arguments: tuple[str, ...], message: str, folder: Path
) -> None:
    with pytest.raises(LaunchError) as caught:
        model_request(str(folder / model), batch, is_checkpointed=False, arguments=arguments, cwd=str(folder))
    assert message in str(caught.value)
