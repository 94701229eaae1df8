from __future__ import annotations

from pathlib import Path

import pytest

from npubundle.errors import FileError, ResourceError
from npurt import Trainer
from npurt.output_folder import OutputFolder
from npurt.storage import PARTIAL
from tests.npurt.simulator import random_pack


def test_made_and_removed_when_nothing_was_written(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with OutputFolder(out):
        assert out.is_dir()
    assert not out.exists()


def test_stays_when_something_was_written(tmp_path: Path, trainer: Trainer) -> None:
    with OutputFolder(tmp_path / "out") as folder:
        trainer.save_adapter(folder.path)
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileError, match=r"other files: model\.safetensors"), OutputFolder(tmp_path):
        pass
    with OutputFolder(tmp_path, keep=[tmp_path / "model.safetensors"]):
        pass


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out"):
        with pytest.raises(FileError, match="another run is writing"), OutputFolder(tmp_path / "out"):
            pass
        assert (tmp_path / "out").is_dir()
    with OutputFolder(tmp_path / "out"):
        pass


def test_checkpoints_of_an_earlier_run(tmp_path: Path, trainer: Trainer) -> None:
    trainer.train_step([random_pack(1)])
    saved = trainer.save_checkpoint(tmp_path)
    with pytest.raises(FileError, match="results of an earlier run: checkpoint-1") as caught, OutputFolder(tmp_path):
        pass
    assert "--overwrite" in str(caught.value.remedy)
    with OutputFolder(tmp_path, overwrite=True) as folder:
        assert saved.exists()
        folder.clear_earlier()
        assert not saved.exists()


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".checkpoint-4.77{PARTIAL}").mkdir()
    with OutputFolder(tmp_path):
        assert not list(tmp_path.iterdir())


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="not enough space"), OutputFolder(tmp_path / "out", needed=1 << 60):
        pass
    assert not (tmp_path / "out").exists()


def test_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot write to the output folder"), OutputFolder(tmp_path / "file" / "out"):
        pass
