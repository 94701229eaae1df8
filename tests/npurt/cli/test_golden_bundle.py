"""The commands on a real, tiny bundle: the golden one of the newest format version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from npubundle.version import FORMAT_VERSION
from npurt import gradient_check
from npurt.cli import main
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE
from npurt.gradient_check import Agreement, GradientReport

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / f"v{FORMAT_VERSION}"
BUNDLE = ["--bundle", str(GOLDEN / "golden.npub"), "--trust", str(GOLDEN / "golden.pub")]
BOUND = [*BUNDLE, "--weights", str(GOLDEN / "model")]
ROWS = ["--data", str(GOLDEN / "train.jsonl")]


def test_train_then_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adapter"
    assert main(["train", *BOUND, *ROWS, "--steps", "20", "--lr", "0.01", "--out", str(out), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(events) == 21
    assert events[19]["loss"] < events[0]["loss"]
    assert sorted(path.name for path in out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    losses = []
    for words in ([], ["--adapter", str(out)]):
        assert main(["eval", *BOUND, *ROWS, "--json", *words]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] < losses[0]


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *BOUND, "--layers", "1"]) == 0
    text = capsys.readouterr().out
    assert "gradients agree" in text
    assert "lora_A.weight" in text
    assert main(["check", *BOUND, "--layers", "99", "--json"]) == 0  # more than there are: all
    report = json.loads(capsys.readouterr().out)
    assert report["good"] is True
    assert all(tensor["cosine"] > 0.9999 for tensor in report["tensors"])
    assert main(["check", *BOUND, *ROWS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] != report["loss"]  # other tokens


def test_check_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*_: Any, **__: Any) -> GradientReport:
        tensors = (Agreement("a.lora_A.weight", 1.0, 1.0), Agreement("a.lora_B.weight", 0.9, 1.0))
        return GradientReport(1, 2.0, 2.0, tensors)

    monkeypatch.setattr(gradient_check, "check_gradients", wrong)
    assert main(["check", *BOUND]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "OUT OF BOUNDS" in line] == ["a.lora_B.weight"]
    assert "gradients do NOT agree" in lines


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(GOLDEN / "golden.npub"), "--trust", str(GOLDEN / "golden.pub")]
    assert main(words) == 0
    assert "signed by" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trusted"] is True
    assert report["digest"].startswith("sha256:")


def test_flipped_bit_is_refused_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray((GOLDEN / "golden.npub").read_bytes())
    raw[len(raw) // 2] ^= 4
    (tmp_path / "bad.npub").write_bytes(raw)
    trust = ["--trust", str(GOLDEN / "golden.pub")]
    assert main(["verify", str(tmp_path / "bad.npub"), *trust]) == 5
    words = ["--bundle", str(tmp_path / "bad.npub"), *trust, "--weights", str(GOLDEN / "model"), *ROWS]
    assert main(["train", *words, "--out", str(tmp_path / "out")]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error[") == 2
    assert not (tmp_path / "out").exists()


def test_without_trust_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NPUCC_TRUST_POLICY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["verify", str(GOLDEN / "golden.npub")]) == 5
    assert "--trust KEY.pub" in capsys.readouterr().err


def test_weights_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    config["rope_theta"] = 77.0
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config))
    words = [*BUNDLE, "--weights", str(model), *ROWS, "--out", str(tmp_path / "out")]
    assert main(["train", *words]) == 7
    said = capsys.readouterr().err
    assert "rms_norm_eps" in said
    assert "rope" in said
    assert not (tmp_path / "out").exists()
