"""The command line with the simulator in place of a bundle's session, for tests that need a process of its own.

    python -m tests.npurt.simulated_cli train --bundle any.npub ...

`SIMULATOR` in the environment is a JSON object: `poison` ({"6": "loss"}), `step_seconds` (so long takes every
micro-step), `load_seconds` (so long takes loading), `checkpoints_fail` (the disk is full whenever one is written),
`signal` (SIGTERM comes while the bundle is opened: "in a finalizer", which loses its exception, or "in exec").
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from npubundle.config import BundleConfig
from tests.npurt.simulator import Simulator, simulated_config


@dataclass
class SimulatedBundle:
    """What the command line needs of a bundle."""

    config: BundleConfig
    manifest_digest: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str, **_: Any) -> Self:
        """No file is read."""
        assert path
        match json.loads(os.environ.get("SIMULATOR", "{}")).get("signal"):
            case "in a finalizer":
                Finalized()
            case "in exec":
                exec("signal.raise_signal(signal.SIGTERM)", {"signal": signal})
        return cls(simulated_config(), Simulator().manifest_digest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


class Finalized:
    """Sends a signal from where Python discards exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def install(settings: dict[str, Any]) -> None:
    """Make `npurt.cli` open the simulator."""
    from npurt import checkpoint
    from npurt import trainer as trainer_module

    on = trainer_module.Trainer.on

    def trainer(_bundle: object, weights: str, config: Any, **keywords: Any) -> Any:
        alive = Path(os.environ.get("SIMULATOR_ALIVE", os.devnull))
        alive.write_text("0")
        jobs = round(10 * settings.get("load_seconds", 0))
        for done in range(jobs):
            keywords["progress"](done, jobs)
            time.sleep(0.1)
        poison = {int(step): what for step, what in settings.get("poison", {}).items()}
        simulator = Simulator(poison=poison)
        micro_step = simulator._micro_step

        def slow() -> None:
            alive.write_text(str(simulator.micro_steps))
            time.sleep(settings.get("step_seconds", 0))
            micro_step()

        simulator._micro_step = slow  # type: ignore[method-assign]
        return on(simulator, weights, config, init_adapter=keywords["init_adapter"])

    def full(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    if settings.get("checkpoints_fail"):
        checkpoint.write_synced = full  # type: ignore[attr-defined,assignment]
    bundle_module = ModuleType("npurt.bundle")
    bundle_module.Bundle = SimulatedBundle  # type: ignore[attr-defined]
    sys.modules["npurt.bundle"] = bundle_module
    trainer_module.Trainer = trainer  # type: ignore[misc,assignment]


if __name__ == "__main__":
    from npurt.cli import main

    install(json.loads(os.environ.get("SIMULATOR", "{}")))
    sys.exit(main())
