from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from npubundle.errors import FileError
from npurt import DivergedError, MismatchError, Trainer
from npurt.export import peft
from npurt.export.peft_reader import load_adapter
from tests.npurt.simulator import ALPHA, HIDDEN, MODULES, RANK, VOCABULARY, Simulator, simulated_config, tensor_name

RECIPE = simulated_config().recipe
SHAPES = {
    tensor_name(module, matrix): shape
    for module in MODULES
    for matrix, shape in (("A", (RANK, HIDDEN)), ("B", (VOCABULARY, RANK)))
}


@pytest.fixture
def adapter(trainer: Trainer, tmp_path: Path) -> Path:
    random = np.random.default_rng(3)
    trainer.set_parameters({name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()})
    return trainer.save_adapter(tmp_path / "adapter")


def change(adapter: Path, **keys: Any) -> None:
    path = adapter / peft.CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def problems_of(adapter: Path) -> dict[str, str]:
    with pytest.raises(MismatchError) as caught:
        load_adapter(adapter, RECIPE, SHAPES)
    return {problem.where.removeprefix("adapter_config.json: "): problem.what for problem in caught.value.problems}


def save_tensors(adapter: Path, tensors: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.as_tensor(values) for name, values in tensors.items()}, adapter / peft.WEIGHTS_FILE)


def test_files_hold_the_core_keys_and_nothing_else(adapter: Path, trainer: Trainer) -> None:
    assert sorted(path.name for path in adapter.iterdir()) == [peft.CONFIG_FILE, peft.WEIGHTS_FILE]
    with safe_open(adapter / peft.WEIGHTS_FILE, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(SHAPES)
        for name in file.keys():  # noqa: SIM118 -- not a dict
            values = file.get_tensor(name)
            assert values.dtype == np.float32
            assert np.array_equal(values, trainer.parameters()[name])
    raw = (adapter / peft.WEIGHTS_FILE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert [name for name in header if name != "__metadata__"] == sorted(SHAPES)


def test_configuration(adapter: Path, simulated_model: Path) -> None:
    config = json.loads((adapter / peft.CONFIG_FILE).read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, int(ALPHA), ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(simulated_model)
    assert config["inference_mode"] is True
    assert config["modules_to_save"] is None


def test_peft_reads_the_configuration(adapter: Path) -> None:
    library = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = library.PeftConfig.from_pretrained(str(adapter))
    assert isinstance(config, library.LoraConfig)
    assert (config.r, config.lora_alpha, config.target_modules) == (RANK, ALPHA, {"q_proj", "v_proj"})


def test_fractional_alpha_stays_fractional() -> None:
    assert peft.AdapterCard(4, 2.5, ("q_proj",), "base").to_dict()["lora_alpha"] == 2.5


def test_equal_adapters_are_equal_files(adapter: Path, trainer: Trainer, tmp_path: Path) -> None:
    again = trainer.save_adapter(tmp_path / "again")
    for name in (peft.CONFIG_FILE, peft.WEIGHTS_FILE):
        assert (adapter / name).read_bytes() == (again / name).read_bytes()


def test_values_that_are_not_finite_are_never_written(adapter: Path, simulator: Simulator, trainer: Trainer) -> None:
    before = (adapter / peft.WEIGHTS_FILE).read_bytes()
    simulator.view("lora")[0] = np.inf
    with pytest.raises(DivergedError) as caught:
        trainer.save_adapter(adapter)
    assert caught.value.problems[0].where == min(SHAPES)
    assert (adapter / peft.WEIGHTS_FILE).read_bytes() == before


def test_earlier_adapter_is_replaced(adapter: Path, trainer: Trainer) -> None:
    trainer.set_parameters({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    trainer.save_adapter(adapter)
    assert all((values == 1).all() for values in load_adapter(adapter, RECIPE, SHAPES).values())


def test_folder_with_other_files_is_refused(adapter: Path, trainer: Trainer) -> None:
    (adapter / "config.json").write_text("{}")
    with pytest.raises(FileError, match=r"other files: config\.json") as caught:
        trainer.save_adapter(adapter)
    assert "adapter-2" in str(caught.value.remedy)
    trainer.save_adapter(adapter, keep=[adapter / "config.json"])


def test_place_that_is_a_file(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="is a file"):
        trainer.save_adapter(tmp_path / "file")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_adapter_is_read_in_every_precision(adapter: Path, trainer: Trainer, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    exact = trainer.parameters()
    rounded = {name: torch.as_tensor(values).to(getattr(torch, dtype)) for name, values in exact.items()}
    save_tensors(adapter, rounded)
    found = load_adapter(adapter, RECIPE, SHAPES)
    for name, values in found.items():
        assert values.dtype == np.float32
        assert np.array_equal(values, rounded[name].float().numpy())


def test_training_starts_from_an_adapter(adapter: Path, trainer: Trainer, simulated_model: Path) -> None:
    with Trainer.on(Simulator(), simulated_model, init_adapter=adapter) as other:
        for name, values in other.parameters().items():
            assert np.array_equal(values, trainer.parameters()[name])


def test_everything_that_does_not_fit_is_reported_at_once(adapter: Path, trainer: Trainer) -> None:
    change(adapter, r=8, lora_alpha=16, target_modules=["q_proj", "k_proj"], use_dora=True, bias="all")
    change(adapter, rank_pattern={"q_proj": 4}, modules_to_save=["lm_head"], use_rslora=True, peft_type="LOHA")
    first, second, third, fourth = sorted(SHAPES)
    values = trainer.parameters()
    save_tensors(
        adapter,
        {
            second: np.zeros((3, 3), np.float32),
            third: values[third].astype(np.float64),
            fourth: np.full_like(values[fourth], np.nan),
            "base_model.model.lm_head.weight": np.zeros(2, np.float32),
            first.replace(".weight", ".default.weight"): values[first],
        },
    )
    found = problems_of(adapter)
    assert "is missing" in found[first]
    assert "has shape [3, 3], the bundle needs" in found[second]
    assert "F64" in found[third]
    assert "not finite" in found[fourth]
    assert "not known" in found["base_model.model.lm_head.weight"]
    assert "save_pretrained" in found[first.replace(".weight", ".default.weight")]
    keys = {"r", "lora_alpha", "target_modules", "use_dora", "bias", "rank_pattern", "modules_to_save", "use_rslora"}
    assert found.keys() >= keys | {"peft_type"}
    assert "is 8; the bundle was built with rank 2" in found["r"]


def test_adapter_that_was_pickled(adapter: Path) -> None:
    (adapter / peft.WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    assert "pickle" in problems_of(adapter)["adapter_model.bin"]


@pytest.mark.parametrize("name", [peft.CONFIG_FILE, peft.WEIGHTS_FILE])
def test_adapter_files_missing_or_damaged(adapter: Path, name: str) -> None:
    (adapter / name).write_bytes(b"\x00{broken")
    with pytest.raises(MismatchError, match="cannot be read"):
        load_adapter(adapter, RECIPE, SHAPES)
    (adapter / name).unlink()
    with pytest.raises(MismatchError, match="No such file"):
        load_adapter(adapter, RECIPE, SHAPES)


def test_settings_of_other_tools_that_change_nothing_are_accepted(adapter: Path) -> None:
    change(adapter, target_modules="all-linear", lora_dropout=0.1, megatron_core="megatron.core", something_new=1)
    assert sorted(load_adapter(adapter, RECIPE, SHAPES)) == sorted(SHAPES)


def test_an_overlong_name_of_a_folder_is_a_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="name too long"):
        peft.require_adapter_folder(tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", [peft.CONFIG_FILE, peft.WEIGHTS_FILE])
def test_what_is_no_regular_file_is_not_read(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(MismatchError, match="not a regular file"):
        load_adapter(adapter, RECIPE, SHAPES)
    (adapter / name).unlink()
    (adapter / name).symlink_to("/dev/zero")
    with pytest.raises(MismatchError, match="not a regular file"):
        load_adapter(adapter, RECIPE, SHAPES)
