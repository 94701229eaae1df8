"""The families of models that npucc compiles. A new one is a file beside this one and a line in `ARCHITECTURES`."""

from npucc.models.architecture import Architecture, LayerTensor, Linear, Tables
from npucc.models.llama import LLAMA
from npucc.models.mistral import MISTRAL

#: By the `model_type` of `config.json`.
ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (LLAMA, MISTRAL)}

__all__ = ["ARCHITECTURES", "Architecture", "LayerTensor", "Linear", "Tables"]
