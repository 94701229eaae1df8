"""The stand-in for furiosa-torch refuses what a card would, and the real one without a card does what it does."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from npurt.devices import rngd
from tests.npurt import fake_furiosa as fake
from tests.npurt.rngd_parts import ADD, compiled

Array = NDArray[Any]


# -- the stand-in keeps its word ---------------------------------------------------------------------------------------


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> fake.FlatDramShape:
    return fake.FlatDramShape.new_as_broadcast(list(sizes), dtype)


def test_the_stand_in_refuses_what_a_card_would(card: fake.Card) -> None:
    _, raw = compiled("add", ADD)
    program = fake.IrRunnable(card, raw)
    with pytest.raises(AssertionError, match="must be the first call"):
        fake.empty(card, shape(4), "furiosa:0")
    card.set_fusion(8)
    x, y = (fake.empty(card, shape(4), "furiosa:0") for _ in range(2))
    with pytest.raises(ValueError, match="Runnable is not loaded"):
        program.execute([x, y])
    fake.Runnable(program).to("furiosa:0")
    short, narrow = (
        fake.empty(card, shape(3), "furiosa:0"),
        fake.empty(card, shape(4, dtype=torch.bfloat16), "furiosa:0"),
    )
    refused: list[tuple[list[Any], type[Exception], str]] = [
        ([x], ValueError, "wrong number of inputs"),
        ([x, torch.zeros(4)], RuntimeError, "Got: cpu"),
        ([x, short], RuntimeError, "Input tensor mismatch"),
        ([x, narrow], RuntimeError, "Input tensor mismatch"),
    ]
    for inputs, kind, message in refused:
        with pytest.raises(kind, match=message):
            program.execute(inputs)
    found = program.execute([x, x])
    assert all(result.storage not in {x.storage, y.storage} for result in found)
    card.fusion = 4
    with pytest.raises(AssertionError, match="another fusion"):
        program.execute([x, y])
    with pytest.raises(RuntimeError, match="already set"):
        card.set_fusion(8)
    with pytest.raises(RuntimeError, match="out of range"):
        fake.empty(card, shape(4), "furiosa:2")


def test_the_stand_in_copies_late(card: fake.Card) -> None:
    card.set_fusion(8)
    tensor = fake.empty(card, shape(4), "furiosa:0")
    assert set(tensor.bytes) == {fake.RUBBISH}
    source = torch.ones(4)
    tensor.copy_(source, non_blocking=True)
    source[:] = 2
    assert tensor.cpu().tolist() == [2, 2, 2, 2]
    tensor.copy_(torch.ones(4), non_blocking=True)
    with pytest.raises(AssertionError, match="given up"):
        card.wait()
    for count in range(fake.IN_FLIGHT + 1):
        tensor.copy_(source, non_blocking=True)
        assert len(card.queue) == min(count + 1, fake.IN_FLIGHT)
    part_of_it = fake.strided_view(tensor, shape(2), offset=4)
    with pytest.raises(AssertionError, match="onto itself"):
        part_of_it.copy_(fake.strided_view(tensor, shape(2), offset=8))
    for offset, message in ((2, "not multiple of itemsize 4"), (12, "out of bounds")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            fake.strided_view(tensor, shape(2), offset=offset)


# -- furiosa-torch itself, on a host without a card --------------------------------------------------------------------


@pytest.mark.skipif(rngd.NODES.exists(), reason="it would open the card of this host")
@pytest.mark.timeout(1500)  # making the environment, the first time, takes minutes
def test_what_the_real_kit_does_without_a_card(rngd_python: str, tmp_path: Path) -> None:
    program = """
        from pathlib import Path
        import numpy as np, torch
        from npubundle.errors import FormatError
        from npubundle.part import Numerics, Part, Port
        from npubundle.tensor import TensorType
        from npurt.devices import rngd
        from npurt.errors import DeviceError

        rngd.NODES = Path("nodes")
        rngd.NODES.mkdir()
        (rngd.NODES / "npu3mgmt").touch()
        device = rngd.RngdDevice()
        kit = device._kit

        def part(requires, *kinds):
            ports = tuple(Port(str(n), TensorType.from_str(kind)) for n, kind in enumerate(kinds))
            digest = "sha256:" + "0" * 64
            return Part("p", digest, ports[:2], ports[2:], (), digest, 1, rngd.MEDIA_TYPE, requires,
                        Numerics(1e-2, "pass"))

        requires = {"furiosa-torch": kit.version, "furiosa-compiler": kit.compiler, "fusion": "8"}
        kinds = ["bf16[4,256]", "bf16[4,256]", "bf16[4,256]"]
        for wanted in (requires | {"furiosa-compiler": "older"}, requires):
            try:
                device.check([part(wanted, *kinds)])
            except DeviceError as error:
                print(error.render())
        print("fusion", kit.furiosa.get_fusion().num_fusion)

        # Views, of host tensors: offsets in bytes, of any type, with the memory of what they are views of.
        raw = torch.arange(64, dtype=torch.uint8)
        view = kit.view(raw, 16, TensorType("bf16", (2, 4)))
        view.zero_()
        print("shared", raw[15:34].tolist(), view.dtype, tuple(view.shape))

        # A program: what it says of itself, and that it must be loaded first.
        from furiosa.torch import CompileModule
        from furiosa.torch._C.config import cache
        from furiosa.torch._C.config.compiler import CompilerConfig, ProgressMode
        cache.set_cache_config(root_dir=str(Path("cache").absolute()))

        class Sum(torch.nn.Module):
            def forward(self, x, y):
                return x + y

        samples = torch.ones(4, 256, dtype=torch.bfloat16), torch.ones(4, 256, dtype=torch.bfloat16)
        exported = torch.export.export(Sum(), samples, strict=False)
        quiet = CompilerConfig(progress_mode=ProgressMode.Silence)
        module = CompileModule.from_exported(exported, compiler_config=quiet)
        found = kit.furiosa.ir.Runnable.deserialize(module.runnable._inner.serialize())
        device._check_program(part(requires, *kinds), found)
        try:
            device._check_program(part(requires, "f32[4,256]", *kinds[1:]), found)
        except FormatError as error:
            print(error)
        try:
            found.execute(samples)
        except ValueError as error:
            print(error)
        print("plain", found.binary.nbytes > 0, found.stacks, hasattr(kit.furiosa.Runnable(found), "to"))
    """
    done = subprocess.run(
        [rngd_python, "-c", textwrap.dedent(program)],
        check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in (
        "furiosa-compiler: the bundle needs older",
        "error[device]: cannot open furiosa:0: ",
        "fusion 8\n",
        f"shared {[15, *[0] * 16, 32, 33]} torch.bfloat16 (2, 4)\n",
        "has a fusion of 8; the inputs bf16[4,256], bf16[4,256]; the outputs bf16[4,256]; the bundle says a fusion",
        "Runnable is not loaded.",
        "plain True [] True\n",
    ):
        assert text in done.stdout, done.stdout
