from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from npurt import checkpoint
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE
from npurt.export.peft_reader import load_adapter
from tests.npurt.cli.conftest import Cli
from tests.npurt.export.test_peft import RECIPE, SHAPES


def test_adapter_is_written_and_its_path_is_all_of_standard_output(cli: Cli) -> None:
    done = cli("train")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{cli.out}\n"
    assert sorted(path.name for path in cli.out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert any(values.any() for name, values in load_adapter(cli.out, RECIPE, SHAPES).items() if "lora_B" in name)


def test_data_is_shown_before_the_first_step(cli: Cli) -> None:
    said = cli("train").stderr
    before = said[: said.index("step 1/4")]
    assert "40 rows" in before
    assert "20 packs" in before
    assert "280 tokens, 240 supervised" in before
    assert "dropped" in before
    assert "⟦" in before
    assert "--max-lora-rank 8" in before


def test_json_has_an_object_for_each_step_and_one_to_close(cli: Cli) -> None:
    done = cli("train", "--json", "--eval-data", str(cli.data))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["step"] * 4 + ["end"]
    assert [event.get("step") for event in events[:4]] == [1, 2, 3, 4]
    assert events[-1]["status"] == "finished"
    assert events[-1]["adapter"] == str(cli.out)
    assert events[-1]["evaluation"] == events[3]["evaluation"]
    assert events[-1]["tokens"] == sum(event["tokens"] for event in events[:4])


def test_log_file(cli: Cli) -> None:
    cli("train", "--eval-data", str(cli.data), "--eval-every", "2")
    events = cli.events()
    kinds = ["run", "step", "step", "evaluation", "step", "step", "evaluation", "end"]
    assert [event["event"] for event in events] == kinds
    run, end = events[0], events[-1]
    assert run["bundle"]["digest"] == "sha256:" + "5" * 64
    assert run["config"]["lr"] == 0.05
    assert run["data"]["rows"] == 40
    assert run["total_steps"] == 4
    assert run["versions"]["numpy"] == np.__version__
    assert (end["status"], end["steps"], end["loss"]) == ("finished", 4, events[5]["loss"])


def test_log_file_may_lie_in_the_output_folder(cli: Cli) -> None:
    inside = str(cli.out / "run.jsonl")
    assert cli("train", "--log-file", inside).returncode == 0
    assert cli("train", "--log-file", inside).returncode == 0
    assert Path(inside).read_text().count('"event": "run"') == 2


def test_dry_run_stops_after_the_preview(cli: Cli) -> None:
    done = cli("train", "--dry-run", "--json")
    (event,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (event["status"], event["total_steps"], event["data"]["packs"]) == ("dry-run", 4, 20)
    assert "⟦" in done.stderr
    assert not cli.out.exists()
    assert not cli.log.exists()


def test_equal_seeds_give_equal_adapters(cli: Cli) -> None:
    found = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        out = cli.folder / name
        assert cli("train", "--seed", seed, "--out", str(out)).returncode == 0
        found.append((out / WEIGHTS_FILE).read_bytes())
    assert found[0] == found[1] != found[2]


def test_training_goes_on_from_an_adapter(cli: Cli) -> None:
    cli("train", "--steps", "8")
    first = json.loads(cli("train", "--json", "--out", str(cli.folder / "b")).stdout.splitlines()[0])
    done = cli("train", "--json", "--init-adapter", str(cli.out), "--out", str(cli.folder / "c"))
    assert json.loads(done.stdout.splitlines()[0])["loss"] < first["loss"]


def test_adapter_that_does_not_fit(cli: Cli) -> None:
    cli("train")
    path = cli.out / CONFIG_FILE
    path.write_text(path.read_text().replace('"r": 2', '"r": 3').replace("v_proj", "k_proj"))
    done = cli("train", "--init-adapter", str(cli.out), "--out", str(cli.folder / "b"))
    assert done.returncode == 7
    assert "error[mismatch]: the adapter does not fit the bundle" in done.stderr
    assert "r: is 3" in done.stderr
    assert "k_proj" in done.stderr
    assert not (cli.folder / "b").exists()


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_divergence(cli: Cli, poison: str) -> None:
    done = cli("train", "--json", simulator={"poison": {"3": poison}})
    assert done.returncode == 8
    error = json.loads(done.stderr.splitlines()[-1])
    assert error["code"] == "diverged"
    assert "step 3" in error["where"]
    assert "--lr" in error["remedy"]
    assert "checkpoint-2" in error["remedy"]
    assert len(done.stdout.splitlines()) == 2
    assert not (cli.out / WEIGHTS_FILE).exists()
    assert checkpoint.load(cli.out / "checkpoint-2").state.step == 2
    assert cli.events()[-1]["status"] == "diverged"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_everything(cli: Cli, number: signal.Signals, code: int) -> None:
    words = ["--steps", "1000", "--accum", "4", "--json"]
    with cli.start("train", *words, simulator={"step_seconds": 0.02}) as process:
        cli.wait_for_micro_step(10)  # within step 3
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    end = json.loads(stdout.splitlines()[-1])
    assert end["status"] == "stopped"
    saved = checkpoint.load(Path(end["checkpoint"]))
    assert saved.state.step == end["steps"] == len(stdout.splitlines()) - 1 >= 2
    assert saved.state.data is not None
    epoch, index = saved.state.data["epoch"], saved.state.data["index"]
    assert isinstance(epoch, int)
    assert isinstance(index, int)
    assert 20 * epoch + index == 4 * end["steps"]
    assert saved.arrays["moment2"].any()
    assert sorted(path.name for path in cli.out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE, f"checkpoint-{end['steps']}"]
    assert f"stopped by {number.name}" in stderr
    assert cli.events()[-1]["status"] == "stopped"


def test_stopped_run_can_be_continued_bit_for_bit(cli: Cli) -> None:
    from npurt import Trainer
    from tests.npurt.simulator import Simulator

    words = ["--steps", "30", "--accum", "2", "--seed", "5"]
    with cli.start("train", *words, "--json", simulator={"step_seconds": 0.02}) as process:
        cli.wait_for_micro_step(15)
        process.terminate()
        stdout, _ = process.communicate(timeout=60)
    end = json.loads(stdout.splitlines()[-1])
    assert 0 < end["steps"] < 30
    config = checkpoint.load(Path(end["checkpoint"])).state.config
    with Trainer.on(Simulator(), cli.model, config) as trainer:
        trainer.restore(end["checkpoint"])
        rest = [report.loss for report in trainer.fit(cli.data)]
        found = trainer.parameters()
    whole = cli("train", *words, "--json", "--out", str(cli.folder / "whole"))
    losses = [json.loads(line)["loss"] for line in whole.stdout.splitlines()]
    assert rest == losses[end["steps"] : -1]
    for name, values in load_adapter(cli.folder / "whole", RECIPE, SHAPES).items():
        assert np.array_equal(values, found[name])


def test_second_signal_ends_at_once(cli: Cli) -> None:
    with cli.start("train", "--steps", "1000", simulator={"step_seconds": 5}) as process:
        cli.wait_for_micro_step(1)
        process.terminate()
        process.terminate()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode in {130, 143}
    assert not (cli.out / WEIGHTS_FILE).exists()


def test_signal_while_loading(cli: Cli) -> None:
    with cli.start("train", simulator={"load_seconds": 50}) as process:
        cli.wait_for_micro_step(0)
        process.terminate()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert stdout == ""
    assert stderr.splitlines()[-1] == "interrupted"
    assert not cli.out.exists()


@pytest.mark.parametrize("where", ["in a finalizer", "in exec"])
def test_signal_where_python_mishandles_exceptions(cli: Cli, where: str) -> None:
    done = cli("train", simulator={"signal": where})
    assert (done.returncode, done.stdout) == (143, "")
    assert re.fullmatch(r"#1 \[bundle\] any.npub INTERRUPTED \d\.\ds\ninterrupted\n", done.stderr)
    assert not cli.out.exists()


def test_bad_data_is_told_while_weights_are_still_loading(cli: Cli) -> None:
    cli.data.write_text("{}\n")
    with cli.start("train", simulator={"load_seconds": 3600}) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 6, stderr
    assert str(cli.data) in stderr


def test_background_jobs_of_shells_can_be_interrupted(cli: Cli) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what `&` in a script does to its children
    try:
        process = cli.start("train", "--steps", "1000", simulator={"step_seconds": 0.02})
    finally:
        signal.signal(signal.SIGINT, previous)
    with process:
        cli.wait_for_micro_step(3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert (cli.out / WEIGHTS_FILE).exists()


def test_nobody_reads_standard_output(cli: Cli) -> None:
    with cli.start("train", "--json", simulator={"step_seconds": 0.02}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 0, stderr
    assert "going on without it" in stderr
    assert (cli.out / WEIGHTS_FILE).exists()


def test_folder_of_a_model_is_not_overwritten(cli: Cli) -> None:
    done = cli("train", "--out", str(cli.model))
    assert done.returncode == 1
    assert "holds other files: tokenizer.json" in done.stderr
    assert "hint: name a new or empty folder" in done.stderr


def test_checkpoints_of_an_earlier_run(cli: Cli) -> None:
    cli("train", "--save-every", "2")
    assert checkpoint.latest(cli.out) == cli.out / "checkpoint-4"
    refused = cli("train", "--steps", "3")
    assert refused.returncode == 1
    assert "--overwrite" in refused.stderr
    assert checkpoint.latest(cli.out) == cli.out / "checkpoint-4"
    assert cli("train", "--steps", "3", "--save-every", "2", "--overwrite").returncode == 0
    assert [path.name for path in checkpoint.existing(cli.out)] == ["checkpoint-2", "checkpoint-3"]


def test_tokenizer_of_another_model(cli: Cli, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    backend = Tokenizer.from_file(str(cli.model / "tokenizer.json"))
    backend.add_tokens([f"word{number}" for number in range(50)])
    backend.save(str(folder / "tokenizer.json"))
    cli.data.write_text('{"text": "word49 word48"}\n')
    done = cli("train", "--weights", str(folder))
    assert done.returncode == 7
    assert "the model's vocabulary has 48" in done.stderr


def test_faults_in_the_data(cli: Cli) -> None:
    cli.data.write_text('{"text": 3}\n{"text": ""}\n{broken\n')
    done = cli("train")
    assert done.returncode == 6
    assert done.stderr.count(f"{cli.data}:") >= 3
    assert not cli.out.exists()


def test_quiet_says_nothing_but_warnings(cli: Cli) -> None:
    done = cli("train", "--progress", "quiet")
    assert all(line.startswith("warning:") for line in done.stderr.splitlines())


def test_options_from_a_file_and_the_environment(cli: Cli) -> None:
    config = cli.folder / "run.toml"
    config.write_text("steps = 9\naccum = 2\nseed = 3\n")
    done = cli("train", "--config", str(config), "--steps", "2", env={"NPURT_ACCUM": "3"})
    assert done.returncode == 0, done.stderr
    found = cli.events()[0]["config"]
    assert (found["steps"], found["accum"], found["seed"]) == (2, 3, 3)


def test_unknown_key_in_the_file(cli: Cli) -> None:
    config = cli.folder / "run.toml"
    config.write_text("stepz = 9\n")
    done = cli("train", "--config", str(config))
    assert done.returncode == 2
    assert "did you mean 'steps'" in done.stderr


def test_full_disk_at_the_end_still_leaves_the_adapter(cli: Cli) -> None:
    done = cli("train", "--save-every", "2", "--json", simulator={"checkpoints_fail": True})
    assert done.returncode == 4
    errors = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert json.loads(errors[-1])["what"] == "cannot save the checkpoint: No space left on device"
    assert "warning: step 2 is not saved" in done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert sorted(path.name for path in cli.out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert cli.events()[-1]["status"] == "resource"
