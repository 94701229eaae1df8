"""The lean runtime: trains with a bundle that `npucc` compiled, without torch, transformers or a compiler.

    from npurt import Bundle, TrainConfig, Trainer

    bundle = Bundle.open("llama.npub", trust="keys/dev.pub")
    trainer = Trainer(bundle, weights="models/llama", config=TrainConfig(lr=2e-4, steps=400, accum=4))
    for report in trainer.fit("train.jsonl"):
        print(report)
    trainer.save_adapter("./adapter")

Everything below is imported when it is first used, so that `import npurt` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npubundle.errors import Error as Error
    from npurt.bundle import Bundle as Bundle
    from npurt.config import TrainConfig as TrainConfig
    from npurt.data import DataOptions as DataOptions
    from npurt.data import Pack as Pack
    from npurt.data import PackedDataset as PackedDataset
    from npurt.errors import DataError as DataError
    from npurt.errors import DeviceError as DeviceError
    from npurt.errors import DivergedError as DivergedError
    from npurt.errors import MismatchError as MismatchError
    from npurt.errors import RuntimeFault as RuntimeFault
    from npurt.errors import UsageError as UsageError
    from npurt.export.merge import merge as merge
    from npurt.export.model import ModelReport as ModelReport
    from npurt.reports import EvalReport as EvalReport
    from npurt.reports import StepReport as StepReport
    from npurt.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "npurt.bundle",
    "DataError": "npurt.errors",
    "DataOptions": "npurt.data",
    "DeviceError": "npurt.errors",
    "DivergedError": "npurt.errors",
    "Error": "npubundle.errors",
    "EvalReport": "npurt.reports",
    "MismatchError": "npurt.errors",
    "ModelReport": "npurt.export.model",
    "Pack": "npurt.data",
    "PackedDataset": "npurt.data",
    "RuntimeFault": "npurt.errors",
    "StepReport": "npurt.reports",
    "TrainConfig": "npurt.config",
    "Trainer": "npurt.trainer",
    "UsageError": "npurt.errors",
    "merge": "npurt.export.merge",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 -- names of modules' members


def __getattr__(name: str) -> Any:
    """Import a public name where it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Every public name, imported already or not."""
    return __all__
