"""`--dump DIR`: every stage of a build as files that people and tools can read."""

from __future__ import annotations

from pathlib import Path

from npubundle import program_json
from npucc.build import Lowered, host_target


def write_dump(folder: Path, lowered: Lowered) -> None:
    """Write the traced layer, the parts as text, JSON and payload (ONNX, which Netron opens), and both programs.

    A part for a device is text instead of a payload: no tool opens one, and compiling it takes minutes.
    """
    stages = {name: folder / name for name in ("1-traced", "2-parts", "3-programs", "4-lowered")}
    for stage in stages.values():
        stage.mkdir(parents=True, exist_ok=True)
    (stages["1-traced"] / "layer.txt").write_text(lowered.traced.layer.as_text(), encoding="utf-8")
    for spec in lowered.specs:
        (stages["2-parts"] / f"{spec.name}.txt").write_text(spec.graph.as_text(), encoding="utf-8")
        (stages["2-parts"] / f"{spec.name}.json").write_bytes(spec.graph.encode())
        target = lowered.target_of(spec.name)
        if target.MEDIA_TYPE == host_target().MEDIA_TYPE:
            payload = target.compile_part(spec.graph).payload
            (stages["4-lowered"] / f"{spec.name}.onnx").write_bytes(payload)
        else:
            (stages["4-lowered"] / f"{spec.name}.txt").write_text(spec.graph.as_text(), encoding="utf-8")
    for role, program in lowered.programs.items():
        (stages["3-programs"] / f"{role}.txt").write_text(program.listing(), encoding="utf-8")
        (stages["3-programs"] / f"{role}.json").write_bytes(program_json.encode(program))
