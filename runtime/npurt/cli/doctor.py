"""`npurt doctor`: what this host has, and whether it can run bundles."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from npubundle.errors import Error, ExitCode
from npurt.cli.options import PREFIX, Settings
from npurt.host import available_memory, usable_cpus
from npurt.metrics import versions
from npurt.signals import Signals

#: Instruction sets that change the speed of matrix products.
_CPU_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve", "bf16")
_ENOUGH_MEMORY = 2 << 30

State = Literal["ok", "note", "fails"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `fails` is what no bundle can run without."""

    what: str
    state: State
    found: str
    remedy: str = ""


def run(settings: Settings, _signals: Signals) -> int:
    """Print what was found; exit code 4 if something fails."""
    findings = [look() for look in _LOOKS]
    if settings["json"]:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        for finding in findings:
            print(f"{finding.state:<6} {finding.what:<12} {finding.found}")
            if finding.remedy:
                print(f"{'':19} hint: {finding.remedy}")
    return int(ExitCode.RESOURCE) if any(finding.state == "fails" for finding in findings) else 0


def _versions() -> Finding:
    found = versions()
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def _processor() -> Finding:
    flags: set[str] = set()
    name = platform.machine()
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    known = " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "no vector extensions known"
    return Finding("processor", "ok", f"{name}, {usable_cpus()} of {os.cpu_count()} cores usable, {known}")


def _memory() -> Finding:
    available = available_memory()
    found = f"{available / 2**30:.1f} GiB available to this process"
    if available < _ENOUGH_MEMORY:
        return Finding("memory", "note", found, "npucc plan   # prints what a bundle needs")
    return Finding("memory", "ok", found)


def _disk() -> Finding:
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        return Finding("disk", "note", f"no temporary file can be written: {error}", "set TMPDIR")
    return Finding("disk", "ok", f"{tempfile.gettempdir()} can be written to")


def _onnxruntime() -> Finding:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as npurt.devices.cpu does
    try:
        import onnxruntime
    except ImportError as error:
        return Finding("onnxruntime", "fails", f"cannot be imported: {error}", "pip install 'npurt[cpu]'")
    import numpy as np

    from npurt.devices.cpu import CpuDevice
    from npurt.devices.onnx_wire import identity_model

    providers = ", ".join(onnxruntime.get_available_providers())
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # as training has it, with the threads of the device
    try:
        CpuDevice()
        session = onnxruntime.InferenceSession(identity_model(17), options, providers=["CPUExecutionProvider"])
        (result,) = session.run(None, {session.get_inputs()[0].name: np.array(3, dtype=np.float32)})
    except Exception as error:  # noqa: BLE001 -- onnxruntime has no root of its own for what it raises
        return Finding(
            "onnxruntime", "fails", f"cannot run a model: {error}", "pip install --force-reinstall 'npurt[cpu]'"
        )
    if float(result) != 3.0:
        return Finding("onnxruntime", "fails", "computes wrong values", "pip install --force-reinstall 'npurt[cpu]'")
    return Finding("onnxruntime", "ok", f"runs models; providers: {providers}")


def _libraries() -> Finding:
    broken = []
    for module in (
        "cryptography.hazmat.primitives",
        "jinja2",
        "ml_dtypes",
        "safetensors",
        "tokenizers",
        "npurt.trainer",
    ):
        try:
            __import__(module)
        except ImportError as error:
            broken.append(f"{module}: {error}")
    if broken:
        return Finding("libraries", "fails", "; ".join(broken), "pip install --force-reinstall npurt")
    return Finding("libraries", "ok", "all can be imported")


def _trust() -> Finding:
    from npubundle.trust import TrustPolicy

    try:
        policy = TrustPolicy.default()
    except Error as error:
        return Finding("trust", "note", str(error), error.remedy or "")
    keys = len(policy.keys)
    if not keys:
        return Finding("trust", "note", "no default trust policy", "commands need --trust KEY.pub")
    return Finding("trust", "ok", f"{policy.origin}: {keys} keys, mode {policy.mode.value}")


def _variables() -> Finding:
    from npurt.cli import COMMANDS, DEBUG_VARIABLE

    known = {option.variable for command in COMMANDS.values() for group in command.options.values() for option in group}
    known |= {DEBUG_VARIABLE, f"{PREFIX}CONFIG"}
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    strangers = [name for name in found if name not in known]
    if strangers:
        return Finding(
            "variables", "note", f"not known: {', '.join(strangers)}", "npurt train --help lists the options"
        )
    return Finding("variables", "ok", ", ".join(found) or f"no {PREFIX} variables are set")


_LOOKS: tuple[Callable[[], Finding], ...] = (
    _versions,
    _processor,
    _memory,
    _disk,
    _libraries,
    _onnxruntime,
    _trust,
    _variables,
)


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
