"""The `rngd` target around its workers: a stand-in for furiosa-torch answers as the real one does.

`tests/npucc/workers` has the real compiler.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npubundle.part import Estimate
from npubundle.tensor import TensorType
from npucc.cache import Identity
from npucc.errors import CompilerError, ResourceError, UnsupportedOperatorError, UsageError
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.targets import CompiledPart, TargetOptions, find, rngd
from npucc.targets.rngd import OutOfMemoryError, RngdTarget, Tactics, _refusal
from npucc.workers.pool import WorkerFailedError
from tests.npucc.rngd_stand_in import VERSIONS, Sdk, script

#: Answers what the file `answer` beside it says, if there is one. A program is what it was asked for, a graph runs as
#: the identity.
WORKER = r"""
import json, os, sys
from pathlib import Path

here = Path(__file__).parent
with (here / "greeted").open("a") as file:
    file.write(input() + "\n")
print(json.dumps({"ok": json.loads((here / "versions").read_text())}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if (here / "answer").exists():
        print((here / "answer").read_text(), flush=True)
    elif (here / "die").exists():
        sys.exit("no memory left")
    elif request["do"] == "compile":
        out = Path(request["out"])
        (out / "part.bin").write_text(json.dumps([request["options"], dict(os.environ)]))
        (out / "part.dfg").write_bytes(Path(request["graph"]).read_bytes())
        summary = {"rlir_stats": {"total_cycle": 12}, "peak_power": "91.23456", "peak_memory_usage_bytes": 4096}
        (out / "summary.json").write_text(json.dumps(summary))
        print(json.dumps({"ok": {}}), flush=True)
    else:
        for (_, source), (_, result) in zip(request["inputs"], request["outputs"]):
            Path(result).write_bytes(Path(source).read_bytes())
        print(json.dumps({"ok": {}}), flush=True)
"""


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sdk:
    return Sdk.install(tmp_path, WORKER, monkeypatch)


MakeTarget = Callable[..., RngdTarget]


@pytest.fixture
def target(sdk: Sdk) -> Iterator[MakeTarget]:
    made: list[RngdTarget] = []

    def make(**changes: Any) -> RngdTarget:
        made.append(RngdTarget(**{"python": sdk.python} | changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def identity(name: str = "same") -> Graph:
    kind = TensorType("f32", (2, 3))
    return capture(name, lambda x: [x + 0], {"x": kind}, ["y"])


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [3, 16, -1])
def test_an_unknown_fusion_is_refused_with_the_known_ones(fusion: int) -> None:
    with pytest.raises(UsageError, match=f"fusion is {fusion}") as caught:
        find("rngd", TargetOptions(fusion=fusion))
    assert caught.value.remedy == "a card's programs use 1, 2, 4, 8 elements"


def test_the_cpu_has_no_fusion() -> None:
    with pytest.raises(UsageError, match="no fusion"):
        find("cpu", TargetOptions(fusion=4))


def test_the_whole_card_is_the_default() -> None:
    found = find("rngd")
    assert (found.NAME, found.jobs, found.CUT.products_per_part) == ("rngd", 1, 3)
    assert found.bundle_options() == {"fusion": "8", "clock_mhz": "1000"}
    chosen = find("rngd", TargetOptions(fusion=2, jobs=5, max_products=1))
    assert (chosen.bundle_options()["fusion"], chosen.jobs, chosen.CUT.products_per_part) == ("2", 5, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (TargetOptions(), {"fusion": "8", "tactic": "ForLlmModelComputeBound"}),
        (TargetOptions(fusion=4, jobs=7), {"fusion": "4", "tactic": "ForLlmModelComputeBound"}),
        (TargetOptions(tactic="Other", max_shapes=2), {"fusion": "8", "tactic": "Other", "max_shapes": "2"}),
    ],
)
def test_what_decides_the_bytes_is_in_the_key(options: TargetOptions, expected: dict[str, str]) -> None:
    """`jobs` does not: it is no option of a part."""
    found = find("rngd", options).options(identity())
    assert found == expected
    plain = Identity.of("same", identity(), "rngd", find("rngd").options(identity()), {})
    assert (Identity.of("same", identity(), "rngd", found, {}).key == plain.key) == (options == TargetOptions())


# -- toolchain --------------------------------------------------------------------------------------------------------


def test_the_toolchain_names_the_sdk_and_the_cross_tools(target: MakeTarget) -> None:
    found = target(fusion=4)
    assert found.toolchain() == {
        **VERSIONS,
        "cross-gcc": "gcc 13.2",
        "binutils": "ld 13.2",
        "worker": str(rngd.WORKER_VERSION),
    }
    assert found.requirements() == {"furiosa-torch": "1.2.3", "furiosa-compiler": "4.5", "fusion": "4"}


@pytest.mark.parametrize("tool", ["aarch64-linux-gnu-gcc", "aarch64-linux-gnu-ld"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_missing_cross_tool_says_how_to_install_it(sdk: Sdk, target: MakeTarget, tool: str, broken: bool) -> None:
    file = sdk.root / "tools" / tool
    if broken:
        script(file, "#!/bin/sh\nexit 1\n")
    else:
        file.unlink()
    with pytest.raises(ResourceError, match=f"{tool} is missing") as caught:
        target().toolchain()
    assert caught.value.where == tool
    assert caught.value.remedy == "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
    assert int(caught.value.exit_code) == 4


def test_the_sdk_is_asked_once_for_each_installation(sdk: Sdk, target: MakeTarget) -> None:
    first = target(fusion=2).toolchain()
    assert sdk.greeted == [{"fusion": 2}]
    kept = json.loads((sdk.root / "env" / "npucc-toolchain.json").read_bytes())
    assert kept["versions"] == VERSIONS
    assert target().toolchain() == first
    assert len(sdk.greeted) == 1  # remembered beside the interpreter

    sdk.write("versions", VERSIONS | {"furiosa-torch": "1.2.4"})
    sdk.record.write_text("a.py,sha256=2,9\n")
    newer = target().toolchain()
    assert newer["furiosa-torch"] == "1.2.4"
    assert len(sdk.greeted) == 2
    assert target().toolchain() == newer
    assert len(sdk.greeted) == 2


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"installation": null, "versions": {"furiosa-torch": "9"}}'])
def test_a_damaged_memory_is_asked_again(sdk: Sdk, target: MakeTarget, damage: str) -> None:
    first = target().toolchain()
    (sdk.root / "env" / "npucc-toolchain.json").write_text(damage)
    assert target().toolchain() == first
    assert len(sdk.greeted) == 2


def test_an_installation_without_a_record_is_asked_every_time(sdk: Sdk, target: MakeTarget) -> None:
    sdk.record.unlink()
    for asked in (1, 2):
        assert target().toolchain()["furiosa-torch"] == "1.2.3"
        assert len(sdk.greeted) == asked
    assert not (sdk.root / "env" / "npucc-toolchain.json").exists()


def test_the_interpreter_is_named_by_a_variable(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUCC_RNGD_PYTHON", str(sdk.root / "none"))
    with pytest.raises(ResourceError, match="not there") as caught:
        RngdTarget().toolchain()
    assert caught.value.where == str(sdk.root / "none")
    assert caught.value.remedy == "set NPUCC_RNGD_PYTHON"
    monkeypatch.setenv("NPUCC_RNGD_PYTHON", sdk.python)
    found = RngdTarget()
    assert found.toolchain()["furiosa-torch"] == "1.2.3"
    found.close()


def test_an_interpreter_without_the_sdk_says_what_to_install(sdk: Sdk, target: MakeTarget) -> None:
    script(sdk.root / "worker" / "rngd.py", "raise SystemExit('No module named furiosa')\n")
    with pytest.raises(ResourceError, match="No module named furiosa") as caught:
        target().toolchain()
    assert caught.value.where == sdk.python
    assert "NPUCC_RNGD_PYTHON" in str(caught.value.remedy)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_part_is_program_graph_and_estimate(target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACTIC_SORTING_SEED", "7")
    part = target(tactics=Tactics("Other", 2)).compile_part(identity())
    asked, environment = json.loads(part.payload)
    assert asked == {"tactic_hint": "Other", "max_num_unique_shapes": 2}
    assert "TACTIC_SORTING_SEED" not in environment
    assert part.graph == identity().encode()
    assert part.estimate == Estimate(12, 91.23, 4096)


def test_a_part_without_a_figure_of_its_power_has_none() -> None:
    for said in ("-", None, "n/a"):
        assert rngd.estimate_of({"rlir_stats": {"total_cycle": 7}, "peak_power": said}) == Estimate(7, None, None)


def test_a_part_runs_in_the_executor(target: MakeTarget) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = target()
    (y,) = found.execute(CompiledPart(b"", b"graph"), identity(), {"x": x})
    assert np.array_equal(y, x)


def test_threads_that_meet_at_their_first_part_share_folder_and_workers(
    sdk: Sdk, target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Slow(tempfile.TemporaryDirectory[str]):
        def __init__(self, **options: Any) -> None:
            time.sleep(0.2)  # all others arrive meanwhile
            super().__init__(**options)
            made.append(self.name)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Slow)
    found, graph = target(jobs=2), identity()
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda _: found.compile_part(graph), range(8)))
    assert len(parts) == 8
    assert len(made) == 1
    assert len(sdk.greeted) <= 2


def test_nothing_is_left_in_the_folder_of_the_workers(target: MakeTarget) -> None:
    found = target()
    found.compile_part(identity())
    home = found._home()
    assert [path.name for path in home.iterdir()] == ["worker-1.log"]
    found.close()
    assert not home.exists()


def test_an_executor_that_fails_is_told(sdk: Sdk, target: MakeTarget) -> None:
    sdk.write("answer", {"error": "ValueError", "text": "bad shape"})
    with pytest.raises(CompilerError, match="does not run part same: bad shape"):
        target().execute(CompiledPart(b"", b"graph"), identity(), {"x": np.zeros((2, 3), np.float32)})


def test_a_worker_that_dies_twice_is_told_with_its_log(sdk: Sdk, target: MakeTarget) -> None:
    sdk.write("die", 1)
    with pytest.raises(WorkerFailedError, match=r"(?s)died twice over part same.*no memory left"):
        target().compile_part(identity())


def test_a_refusal_reaches_the_caller(sdk: Sdk, target: MakeTarget) -> None:
    sdk.write("answer", {"error": "CompileError", "text": "no tactic", "nodes": ["add"]})
    with pytest.raises(UnsupportedOperatorError, match=r"part same at add = aten\.add\.Tensor f32\[2,3\]: no tactic"):
        target().compile_part(identity())


@pytest.mark.parametrize(
    ("answer", "kind", "said", "remedy"),
    [
        ({"error": "MemoryError", "text": ""}, OutOfMemoryError, "out of memory", "smaller -j"),
        (
            {"error": "CompileError", "text": "aarch64-linux-gnu-gcc: not found"},
            ResourceError,
            "the cross compiler failed",
            "apt-get install",
        ),
        (
            {"error": "X", "text": "sh: 1: cc: command not found"},
            ResourceError,
            "the cross compiler",
            "apt-get install",
        ),
        (
            {"error": "CompileError", "text": "unsupported roll", "nodes": ["add"]},
            UnsupportedOperatorError,
            "does not take part same at add = aten.add.Tensor f32[2,3]: unsupported roll",
            "npucc diagnose --part same",
        ),
        ({"error": "CompileError"}, UnsupportedOperatorError, "does not take part same:", "npucc diagnose --part same"),
        (
            {"error": "OSError", "text": "No space left on device"},
            ResourceError,
            "cannot read or write its files: No space left",
            "free space in the folder for temporary files",
        ),
    ],
)
def test_what_a_user_can_mend_is_told_apart(
    answer: dict[str, Any], kind: type[CompilerError], said: str, remedy: str
) -> None:
    failure = _refusal(identity(), answer)
    assert type(failure) is kind
    assert said in failure.what
    assert remedy in str(failure.remedy)
    assert "same" in str(failure)


def test_the_end_of_a_long_text_is_kept() -> None:
    failure = _refusal(identity(), {"error": "CompileError", "text": "x" * 5000 + "the reason"})
    assert failure.what.endswith("the reason")
    assert len(failure.what) < 2000
