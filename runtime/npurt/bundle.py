"""An opened bundle: verified first, then read. The public way from a file to programs and parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from npubundle import program_check, program_json
from npubundle.config import BundleConfig
from npubundle.container import Container, open_container
from npubundle.errors import FormatError
from npubundle.part import Part
from npubundle.program import Program
from npubundle.trust import TrustPolicy
from npurt.devices.device import Form


class Bundle:
    """A bundle whose signatures satisfied a trust policy. Close it, or use it as a context manager.

    Blobs are hashed again whenever they are read, so what is used is what was signed.
    """

    def __init__(self, container: Container) -> None:
        """Read `bundle.json` of a container that is open. Raises `FormatError` if it is not valid."""
        self._container = container
        self.config = BundleConfig.of(container)
        self.parts: Mapping[str, Part] = {part.name: part for part in self.config.parts}
        self._programs: dict[str, Program] = {}

    @classmethod
    def open(cls, path: str | Path, trust: str | Path | TrustPolicy | None = None) -> Self:
        """Open an `.npub` file or an image layout folder.

        `trust` is a public key, a policy file, or a policy; None takes the default policy of this user or host. Raises
        `SignatureError` if the policy is not satisfied, `IntegrityError` if bytes are not what they should be,
        `FileError` if they cannot be read.
        """
        policy = trust if isinstance(trust, TrustPolicy) else TrustPolicy.from_paths([] if trust is None else [trust])
        container = open_container(os.fspath(path), policy)
        try:
            return cls(container)
        except BaseException:
            container.close()
            raise

    @property
    def manifest_digest(self) -> str:
        """Digest of the manifest: it identifies the bundle's content, and is what signatures are about."""
        return self._container.manifest_digest

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the bundle is not trusted, where the policy's mode is `warn` and it is used all the same."""
        return self._container.verdict.warnings

    def program(self, name: str = "train") -> Program:
        """A program, checked against the parts that it calls. Raises `FormatError` if it is missing or not valid."""
        if name not in self._programs:
            digest = self.config.programs.get(name)
            if digest is None:
                raise FormatError(f"the bundle has no program {name!r}", remedy="rebuild the bundle")
            program = program_json.decode(self._read(digest), where=f"program {name}")
            program_check.check(program, self.parts, where=f"program {name}")
            self._programs[name] = program
        return self._programs[name]

    def payload(self, part: str, form: Form = "payload") -> bytes:
        """The bytes of a part: what was compiled, the graph that it was compiled from, or an ONNX model of it.

        Raises `IntegrityError` if they are damaged, `FormatError` if they are missing.
        """
        found = self.parts[part]
        if form == "payload":
            return self._read(found.digest)
        if form == "onnx":
            if (onnx := found.as_onnx()) is None:
                raise FormatError(f"the bundle has no ONNX form of part {part}", remedy="rebuild the bundle")
            return self._read(onnx.digest)
        if found.graph is None:
            raise FormatError(f"the bundle has no graph of part {part}", remedy="rebuild with npucc build --graphs")
        return self._read(found.graph.digest)

    def close(self) -> None:
        """Release the file; programs and parts cannot be read any more."""
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, digest: str) -> bytes:
        blob = self._container.blobs.get(digest)
        if blob is None:
            raise FormatError(f"the bundle does not contain the blob {digest}", remedy="rebuild the bundle")
        return blob.read()
