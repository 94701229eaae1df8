"""The folder that a run writes to: checked before hours are spent, and kept by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from npubundle.errors import Error, FileError, os_failure
from npurt import checkpoint
from npurt.export.peft import require_adapter_folder
from npurt.storage import PARTIAL, remove_folder, remove_partial, require_space

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of file systems that have none


class OutputFolder:
    """`with OutputFolder(path) as folder:` makes the folder if need be, and keeps other runs out of it meanwhile.

    `model` is the folder in it that a run makes whose result is a whole model. Raises `FileError` if it holds foreign
    files (but those of `keep`), checkpoints or such a model of an earlier run (unless `overwrite`), cannot be written
    to, or is in use, and `ResourceError` if there is no room for `needed` bytes. An empty folder is removed again at
    the end.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        keep: Iterable[Path] = (),
        needed: int = 0,
        model: str | None = None,
    ) -> None:
        self.path = path
        self.keep = tuple(keep)
        self.model = None if model is None else path / model
        self._overwrite = overwrite
        self._needed = needed
        self._handle: int | None = None

    def __enter__(self) -> Self:
        """Claim the folder."""
        require_adapter_folder(self.path, keep=[*self.keep, *([self.model] if self.model else [])])
        earlier = self._earlier()
        if earlier and not self._overwrite:
            raise FileError(
                f"the folder holds results of an earlier run: {', '.join(path.name for path in earlier)}",
                where=str(self.path),
                remedy="name another folder, or add --overwrite to delete them; Trainer.restore continues from one",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._handle = self._lock()
            probe = self.path / f".probe{PARTIAL}"
            probe.write_bytes(b"\0")
            remove_partial(self.path)
            require_space(self.path, self._needed, "save results and checkpoints")
        except OSError as error:
            self.__exit__()
            raise os_failure(error, "write to the output folder") from error
        except Error:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in, and leave no empty folder behind."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            with suppress(OSError):  # not empty
                self.path.rmdir()

    def clear_earlier(self) -> None:
        """Delete what the earlier run left, once the new run is certain to start."""
        for path in self._earlier():
            try:
                remove_folder(path)
            except OSError as error:
                raise os_failure(error, "delete results of the earlier run") from error

    def _earlier(self) -> tuple[Path, ...]:
        """Checkpoints, and the model where this run makes one. Adapters are replaced when there is a new one."""
        found = checkpoint.existing(self.path)
        return (*found, self.model) if self.model is not None and self.model.is_dir() else found

    def _lock(self) -> int:
        """Open the folder and lock it, as long as it stays open."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise FileError(
                "another run is writing to the folder",
                where=str(self.path),
                remedy="wait for it to end, or name another folder",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
        return handle
