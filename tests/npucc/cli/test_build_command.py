from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from npubundle import keys, program_json
from npucc.build import Compiled, Lowered
from npucc.cache import Cache
from npucc.graph import Graph
from tests.npucc import tiny
from tests.npucc.cli.conftest import Run


def test_one_line_for_people_and_progress_beside_it(
    run: Run, options: list[str], key: Path, signed: Compiled, tmp_path: Path, bundle: Path
) -> None:
    made = run("build", *options, "--key", key, "-o", "out.npub")
    assert made.code == 0
    assert made.out == f"{signed.content.manifest_digest}  out.npub\n"
    assert "#3 [adamw] adamw CACHED\n" in made.err
    assert "22/22 parts, 100 % cached, " in made.err
    assert (tmp_path / "out.npub").read_bytes() == bundle.read_bytes()


def test_one_object_for_programs(run: Run, options: list[str], key: Path, signed: Compiled, tmp_path: Path) -> None:
    made = run("build", *options, "--key", key, "--json", "--progress", "quiet")
    told = made.json
    assert made.err == ""
    assert told.pop("seconds") > 0
    assert told == {
        "bundle": f"{signed.config.name}.npub", "digest": signed.content.manifest_digest, "name": signed.config.name,
        "signed": True, "parts": 22, "compiled": 0, "cached": 22, "memory_peak": signed.config.memory.peak,
        "estimate": None,
    }  # fmt: skip
    assert (tmp_path / told["bundle"]).is_file()


def test_a_folder_can_be_written(run: Run, options: list[str], key: Path, trust: Path, tmp_path: Path) -> None:
    assert run("build", *options, "--key", key, "-o", "layout").code == 0
    assert (tmp_path / "layout" / "index.json").is_file()
    assert run("verify", "layout", "--trust", trust).code == 0


def test_an_unsigned_bundle_is_built_with_a_warning(run: Run, options: list[str], signed: Compiled) -> None:
    made = run("build", *options, "--json")
    assert made.json["signed"] is False
    assert made.json["digest"] == signed.content.manifest_digest
    assert "warning: without --key the bundle is unsigned" in made.err


def test_a_key_that_others_may_read_is_used_with_a_warning(run: Run, options: list[str], tmp_path: Path) -> None:
    keys.save(keys.generate(), tmp_path / "dev")
    (tmp_path / "dev").chmod(0o644)
    made = run("build", *options, "--key", "dev", "-o", "out.npub")
    assert made.code == 0
    assert "warning: the private key dev has mode 0644" in made.err
    assert stat.S_IMODE((tmp_path / "dev").stat().st_mode) == 0o644


def test_a_key_that_cannot_be_used_ends_the_build_before_it_begins(
    run: Run, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.save(keys.generate(), tmp_path / "dev", b"secret")
    refused = run("build", *options, "--key", "dev")
    assert refused.code == 1
    assert refused.err == "error[key]: this key is encrypted\n  where: dev\n  hint: set NPUCC_KEY_PASSPHRASE\n"
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "wrong")
    assert "wrong passphrase" in run("build", *options, "--key", "dev").err
    assert run("build", *options, "--key", "nowhere").code == 1
    monkeypatch.setenv("NPUCC_KEY_PASSPHRASE", "secret")
    assert run("build", *options, "--key", "dev").code == 0


def test_progress_can_be_read_by_programs(run: Run, options: list[str]) -> None:
    lines = [json.loads(line) for line in run("build", *options, "--progress", "json").err.splitlines()]
    assert {line["state"] for line in lines} == {"", "START", "DONE", "CACHED"}


def test_a_dump_shows_every_stage(run: Run, options: list[str], tmp_path: Path, lowered: Lowered) -> None:
    assert run("build", *options, "--dump", "dump").code == 0
    folder = tmp_path / "dump"
    assert sorted(path.name for path in folder.iterdir()) == ["1-traced", "2-parts", "3-programs", "4-lowered"]
    assert (folder / "1-traced" / "layer.txt").read_text() == lowered.traced.layer.as_text()
    for name in lowered.identities:
        graph = lowered.traced.parts[name].graph
        assert (folder / "2-parts" / f"{name}.txt").read_text() == graph.as_text()
        assert Graph.from_dict(name, json.loads((folder / "2-parts" / f"{name}.json").read_bytes())) == graph
        onnx.checker.check_model(str(folder / "4-lowered" / f"{name}.onnx"), full_check=True)
    for role, program in lowered.programs.items():
        assert (folder / "3-programs" / f"{role}.txt").read_text() == program.listing()
        assert program_json.decode((folder / "3-programs" / f"{role}.json").read_bytes()) == program


# -- recipe files -----------------------------------------------------------------------------------------------------

RECIPE = """
model = "model"
target = "cpu"

[recipe]
mode = "lora"
rank = 3
alpha = 6
targets = ["v", "q"]
seq_len = 14
activations = "auto"
memory_budget = "16GiB"
logits = false
"""


@pytest.fixture
def recipe(tmp_path: Path, config_file: Path) -> Path:
    """A recipe file beside a folder with the tiny model."""
    folder = tmp_path / "recipes"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_bytes(config_file.read_bytes())
    (folder / "tiny.toml").write_text(RECIPE)
    return folder / "tiny.toml"


def test_a_recipe_file_is_the_same_as_flags(run: Run, recipe: Path, options: list[str], warm_cache: Cache) -> None:
    flags = run("build", *options, "--targets", "q,v", "--memory-budget", "16GiB", "--mode", "lora", "--json").json
    file = run("build", "--recipe", recipe, "--cache-dir", warm_cache.root, "--json").json
    assert file["digest"] == flags["digest"]


def test_flags_win_over_the_file(run: Run, recipe: Path, warm_cache: Cache) -> None:
    words = ["plan", "--recipe", recipe, "--cache-dir", warm_cache.root, "--rank", "9", "--json"]
    changed = run(*words).json
    assert {part["name"] for part in changed["parts"] if not part["cached"]} >= {"adamw", "clip"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RECIPE.replace("seq_len", "seqlen"), "seqlen: is not a known key; did you mean 'seq_len'?"),
        (RECIPE.replace("target = ", "tarket = "), "tarket: is not a known key; did you mean 'target'?"),
        (RECIPE.replace("rank = 3", "rank = 0\nalpha2 = 1"), "rank: must be at least 1, is 0"),
        (RECIPE.replace('["v", "q"]', '["v", "w"]'), "targets: 'w' is not a LoRA target"),
        (RECIPE.replace('"16GiB"', '"16 parsecs"'), "'16 parsecs' is not a size"),
        (RECIPE.replace("[recipe]", "recipe = 3\n[other]"), "recipe: must be a table"),
        ("model = ", "the recipe is not TOML"),
        ("[" * 5000, "the recipe is not TOML"),
        ('model = "a\\u0000b"\n', "model: must be text without NUL"),
        ("#" * (1 << 20) + "\n", "are allowed"),
    ],
)
def test_faults_of_a_recipe_file_are_named(run: Run, recipe: Path, text: str, said: str) -> None:
    recipe.write_text(text)
    refused = run("plan", "--recipe", recipe)
    assert refused.code == 2
    assert refused.err.startswith("error[usage]:")
    assert said in refused.err


def test_all_faults_of_a_recipe_come_at_once(run: Run, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("rank = 3", "rank = 0\nalpha2 = 1").replace('"auto"', '"some"'))
    refused = run("plan", "--recipe", recipe, "--seq-len", "2", "--json")
    places = [problem["where"] for problem in json.loads(refused.err)["problems"]]
    assert places == ["rank", "activations", "alpha2"]


def test_a_recipe_file_that_is_not_there_is_named(run: Run) -> None:
    refused = run("plan", "--recipe", "nowhere.toml")
    assert refused.code == 2
    assert "where: nowhere.toml" in refused.err


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [("6GiB", 6 << 30), ("500MB", 5 * 10**8), ("1073741824", 1 << 30), ("1.5k", 1500), (" 2 Ti ", 2 << 40), ("7b", 7)],
)
def test_sizes(size: str, bytes_: int) -> None:
    from npucc.cli.options import parse_size

    assert parse_size(size) == bytes_


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--no-such-option"], 2, "error[usage]: No such option: --no-such-option"),
        (["--rank", "x"], 2, "error[usage]: Invalid value for '--rank'"),
        (["--rank", "0"], 2, "error[usage]: Invalid value for '--rank'"),
        (["--activations", "most"], 2, "error[usage]: Invalid value for '--activations'"),
        (["--targets", "q,z"], 2, "targets: 'z' is not a LoRA target"),
        (["--targets", ""], 2, "targets: must have at least 1 items"),
        (["--alpha", "0"], 2, "alpha: must be at least"),
        (["--memory-budget", "much"], 2, "'much' is not a size"),
        (["--memory-budget", "9" * 400], 2, "is not a size"),
        (["--alpha", "nan"], 2, "alpha: must be a finite number, is nan"),
        (["--memory-budget", "0"], 2, "memory_budget: must be at least 1"),
        (["--target", "abacus"], 2, "error[usage]: unknown target 'abacus'\n  hint: targets of this release: cpu"),
        (["--model", "nowhere"], 2, "error[usage]: there is no model configuration here\n  where: nowhere"),
    ],
)
def test_usage_errors(run: Run, options: list[str], words: list[str], code: int, said: str) -> None:
    refused = run("build", *options, *words)
    assert refused.code == code
    assert said in refused.err
    assert refused.out == ""


def test_a_model_is_needed(run: Run) -> None:
    refused = run("plan")
    assert refused.code == 2
    assert "error[usage]: no model is given\n  hint: add --model DIR" in refused.err


def test_an_unsupported_model_is_refused_with_all_reasons(run: Run, options: list[str], tmp_path: Path) -> None:
    document = tiny.config(model_type="qwen2", hidden_act="gelu", surprise=1)
    (tmp_path / "config.json").write_text(json.dumps(document))
    refused = run("build", *options, "--model", "config.json")
    assert refused.code == 3
    assert refused.err.endswith(
        "error[unsupported-model]: this model cannot be compiled\n  where: config.json\n"
        "  - model_type: 'qwen2' is not a supported architecture; supported are llama, mistral\n"
        "  - hidden_act: changes the mathematics: 'gelu' is not supported, only 'silu' or 'swish'\n"
        "  - surprise: is not known, and might change the mathematics\n"
        "  hint: a key that is known to change nothing can be passed over with --ignore-config-key NAME\n"
    )


def test_a_key_can_be_passed_over(run: Run, options: list[str], tmp_path: Path, signed: Compiled) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(surprise=1, other=2)))
    words = ["--model", "config.json", "--ignore-config-key", "surprise", "--ignore-config-key", "other"]
    assert run("build", *options, *words, "--json").json["digest"] == signed.content.manifest_digest


def test_a_name_that_is_none_is_refused(run: Run, options: list[str], tmp_path: Path) -> None:
    refused = run("build", *options, "--name", "a b")
    assert refused.code in {2, 5}
    assert list(tmp_path.glob("*.npub")) == []


def test_a_disk_without_room_is_told_and_left_as_it_was(run: Run, options: list[str], tmp_path: Path) -> None:
    """No file may grow beyond some bytes here: neither cache entries nor the bundle can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "cache").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        refused = run("build", *options, "--cache-dir", "cache", "-o", "out.npub")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.code == 4
    assert "warning: clip is not cached: File too large" in refused.err
    assert "error[resource]: " in refused.err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_output_that_cannot_be_written_is_named(run: Run, options: list[str]) -> None:
    refused = run("build", *options, "-o", "no/such/folder/out.npub")
    assert refused.code in {1, 4}
    assert "no/such/folder" in refused.err


@pytest.mark.parametrize(
    ("number", "code", "while_"), [(signal.SIGTERM, 143, "[head] head.begin"), (signal.SIGINT, 130, "[trace]")]
)
def test_a_signal_ends_a_build_and_leaves_nothing_behind(
    config_file: Path, tmp_path: Path, number: signal.Signals, code: int, while_: str
) -> None:
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "NPUCC_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    command = [sys.executable, "-m", "npucc", "build", "--model", str(config_file), "--progress", "json"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if while_ in line:
            break
    time.sleep(0.05)
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in rest
    # An empty folder is PyTorch's. onnxruntime would leave the id of its reports here, were it not told to make none.
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    assert list(tmp_path.glob("*.npub")) == []
    assert {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} <= {".part"}
