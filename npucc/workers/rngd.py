"""The worker for RNGD. Runs by itself, with furiosa-torch, the standard library and nothing of npucc.

    python -I rngd.py        reads one JSON object per line from standard input, answers each with one line

The first line is `{"fusion": 8}`; the answer tells versions. A request names what to `do`:

    compile  graph, options, out, form  -> part.bin (the serialized Runnable), part.dfg, summary.json
    import   graph, options, out, form  -> part.dfg alone
    execute  dfg, inputs, outputs       -> runs a part.dfg on the CPU; tensors are .npy files

`form` says what part.dfg is: the graph as the compiler `imported` it, or `lowered`, with the device's casts. Answers
are `{"ok": …}` or `{"error": kind, "text": …, "nodes": […]}`, the nodes of the graph that the compiler blames. Standard
output is kept for answers: whatever the vendor's libraries print there goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

Json = dict[str, Any]
#: Makes a context of a node's name.
Around = Callable[[str], AbstractContextManager[Any]]
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64", "bool": "bool"}


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    first = json.loads(sys.stdin.readline())
    worker = Worker(int(first["fusion"]))
    print(json.dumps({"ok": worker.versions()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone: a compilation notices nothing for minutes."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class Worker:
    """furiosa-torch, set up for one fusion."""

    def __init__(self, fusion: int) -> None:
        import furiosa.torch

        furiosa.torch.set_fusion(fusion)  # must be the first call of all
        self.fusion = fusion

    def versions(self) -> Json:
        """What else than the request determines the bytes."""
        import furiosa.torch
        import torch

        compiler, package = furiosa.torch.compiler.version(), furiosa.torch.version
        return {
            "furiosa-torch": str(package() if callable(package) else package),
            "furiosa-compiler": str(compiler),
            "torch": torch.__version__.partition("+")[0],
        }

    def answer(self, request: Json) -> Json:
        """Do what is asked for. A failure is an answer."""
        started = time.monotonic()
        try:
            made = getattr(self, f"do_{request['do']}")(request)
        except BaseException as error:  # a panic of the compiler derives from BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            traceback.print_exc()
            kind = "OSError" if isinstance(error, OSError) else type(error).__name__
            return {"error": kind, "text": str(error), "nodes": _blamed(request, str(error))}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"ok": made | {"seconds": round(time.monotonic() - started, 3), "peak_kib": peak}}

    def do_compile(self, request: Json) -> Json:
        """Compile a graph; write its program, its imported graph, and the compiler's summary."""
        from furiosa.torch import CompileModule

        graph, out = _read(request["graph"]), Path(request["out"])
        exported = _export(graph)
        (out / "part.dfg").write_bytes(_dfg(exported, request))
        with _private_cache(out / "sdk") as folder:
            module = CompileModule.from_exported(exported, compiler_config=_config(request["options"]))
            summary = sorted(folder.glob("*/summary/summary.json"))
            if summary:
                shutil.copyfile(summary[0], out / "summary.json")
        runnable = module.runnable._inner  # noqa: SLF001 -- the only way to the bytes
        _check_interface(graph, module, runnable)
        (out / "part.bin").write_bytes(runnable.serialize())
        return {"fusion": runnable.expected_num_fusion}

    def do_import(self, request: Json) -> Json:
        """Write the graph that `execute` runs, without a program."""
        exported = _export(_read(request["graph"]))
        (Path(request["out"]) / "part.dfg").write_bytes(_dfg(exported, request))
        return {}

    def do_execute(self, request: Json) -> Json:
        """Run a graph on the CPU. `inputs` are files, `outputs` pairs of a type and a file."""
        import numpy as np
        import torch
        from furiosa.torch._C.executor import DfgExecutor

        inputs = [_tensor(np.load(name, mmap_mode="r"), kind) for kind, name in request["inputs"]]
        found = DfgExecutor.deserialize(Path(request["dfg"]).read_bytes()).execute(inputs)
        if len(found) != len(request["outputs"]):
            raise ValueError(f"the graph gives {len(found)} outputs, {len(request['outputs'])} are expected")
        for raw, (kind, name) in zip(found, request["outputs"], strict=True):
            dtype, shape = _kind(kind)
            tensor = raw.contiguous().view(-1).view(torch.uint8).view(dtype).view(shape)
            np.save(name, tensor.float().numpy() if dtype == torch.bfloat16 else tensor.numpy())
        return {}


class _private_cache:  # noqa: N801 -- used as a function
    """A cache of the SDK's own for one compilation: the usual one also remembers failures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        from furiosa.torch._C.config import cache

        self.folder.mkdir()
        cache.set_cache_config(root_dir=str(self.folder), summary=True)
        return self.folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _dfg(exported: Any, request: Json) -> bytes:
    """The graph in the form that the request wants. Lowering takes as long as compiling."""
    from furiosa.torch import DfgModule, compiler
    from furiosa.torch.export.exported_program import preprocess_exported_program

    if request["form"] == "imported":
        return bytes(DfgModule.from_exported(exported).dfg.serialize())
    processed, _ = preprocess_exported_program(exported)
    with _private_cache(Path(request["out"]) / "lowering"):
        return bytes(compiler.lower(processed, compiler_config=_config(request["options"])).serialize())


def _config(options: Json) -> Any:
    from furiosa.torch._C.config.compiler import CompilerConfig, ProgressMode, TacticHintConfig

    chosen: Json = {key: value for key, value in options.items() if value is not None}
    if "tactic_hint" in chosen:
        chosen["tactic_hint"] = getattr(TacticHintConfig, chosen["tactic_hint"])
    return CompilerConfig(progress_mode=ProgressMode.Silence, **chosen)


def _read(path: str) -> Json:
    document: Json = json.loads(Path(path).read_bytes())
    return document


def _export(graph: Json, around: Around = nullcontext) -> Any:
    """The graph as an ExportedProgram. It is executed on fake tensors, operator by operator; nothing is traced anew."""
    import torch

    class Part(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
            return _run(graph, inputs, around)

    samples = tuple(torch.empty(shape, dtype=dtype) for dtype, shape in (_kind(kind) for _, kind in graph["inputs"]))
    return torch.export.export(Part(), samples, strict=False)


def _run(graph: Json, inputs: Any, around: Around = nullcontext) -> list[Any]:
    """Compute the outputs, every node within the context that `around` makes of its name."""
    import torch

    values = {name: tensor for (name, _), tensor in zip(graph["inputs"], inputs, strict=True)}

    def value(arg: Any) -> Any:
        if isinstance(arg, dict):
            return values[arg["ref"]] if "ref" in arg else float(arg["float"])
        return [value(item) for item in arg] if isinstance(arg, list) else arg

    def computed(op: str, args: Any, kwargs: Json, kind: str) -> Any:
        dtype, shape = _kind(kind)
        if op == "constant":
            return torch.tensor(args[0], dtype=dtype).reshape(shape)
        if op == "aten.view.default":  # a canonical graph has no strides, so that a view may have to copy
            return torch.reshape(value(args[0]), shape)
        chosen = {key: value(arg) for key, arg in kwargs.items()}
        if "dtype" in chosen or op in {"aten.full.default", "aten.arange.start_step"}:
            chosen["dtype"] = dtype
        operator: Any = reduce(getattr, op.split("."), torch.ops)
        return operator(*map(value, args), **chosen)

    for name, *what in graph["nodes"]:
        with around(name):
            values[name] = computed(*what)
    # An output that is a transposed view would leave the card in the order of the memory behind it, unannounced: the
    # compiler keeps torch's strides to itself.
    return [values[name].contiguous() for _, name in graph["outputs"]]


def _check_interface(graph: Json, module: Any, runnable: Any) -> None:
    """The program must take and give what the graph does: anything that was folded away would be lost."""
    kept = module.output_reconstructor
    empty = kept.zero_sized_tensor_info.output_indices_and_tensors if kept.zero_sized_tensor_info else ()
    if kept.passthrough_pairs or empty:
        raise ValueError("an output of the part is an input of it, or empty")
    indices = kept.output_reconstruction_indices
    if indices is not None and list(indices) != list(range(len(graph["outputs"]))):
        raise ValueError("two outputs of the part are the same value")
    types = dict(graph["inputs"]) | {node[0]: node[4] for node in graph["nodes"]}
    wanted = [[_kind(kind) for _, kind in graph["inputs"]], [_kind(types[name]) for _, name in graph["outputs"]]]
    shapes = (runnable.input_dram_shapes, runnable.output_dram_shapes)
    found = [[(s.dtype, tuple(s.host_sizes)) for s in side] for side in shapes]
    if found != [[(dtype, tuple(shape)) for dtype, shape in side] for side in wanted]:
        raise ValueError(f"the compiled program has inputs and outputs {found}, the graph {wanted}")


def _kind(text: str) -> tuple[Any, tuple[int, ...]]:
    """`bf16[2,3]` -> (torch.bfloat16, (2, 3))."""
    import torch

    dtype, _, sizes = text.rstrip("]").partition("[")
    return getattr(torch, _DTYPES[dtype]), tuple(int(size) for size in sizes.split(",") if size)


def _tensor(array: Any, kind: str) -> Any:
    import torch

    dtype, _ = _kind(kind)
    return torch.from_numpy(array.copy()).to(dtype)


def _blamed(request: Json, text: str) -> list[str]:
    """The nodes of the request's graph that an error's text names, in order.

    The compiler knows them by the names that they have in the exported program, as in `#gm:sum_1`. So the graph is
    exported again, noting which of its nodes each of those comes from.
    """
    import torch.fx.traceback as meta
    from furiosa.torch.export.exported_program import preprocess_exported_program

    named = set(re.findall(r"#gm:(\w+)", text)) - {"merge"}
    if "graph" not in request or not named:
        return []
    graph = _read(request["graph"])
    try:
        with meta.preserve_node_meta():
            exported = _export(graph, lambda name: meta.annotate({"node": name}))
        processed, _ = preprocess_exported_program(exported)
    except Exception:  # noqa: BLE001 -- what went wrong has been told; this is only for comfort
        return []
    found = {n.meta.get("custom", {}).get("node") for n in processed.graph.nodes if n.name in named}
    return [node[0] for node in graph["nodes"] if node[0] in found]


if __name__ == "__main__":
    main()
