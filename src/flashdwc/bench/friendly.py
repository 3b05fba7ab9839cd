"""What stands between a failure and the person at the keyboard: one clear line instead of a traceback."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

INSTALL = "pip install 'flashdwc[bench]'"
_OS_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "it exists already and is not a folder",
    errno.EISDIR: "it is a folder",
    errno.ENOENT: "no such file or folder",
}


class UserError(Exception):
    """A failure that the user can act on. The command line prints its message as one line and exits with ``code``."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def os_error(action: str, error: OSError) -> UserError:
    """Turns an ``OSError`` into a line that says what could not be done, where, and why."""
    reason = _OS_REASONS.get(error.errno or 0) or error.strerror or str(error)
    where = f" {error.filename}" if error.filename else ""
    return UserError(f"cannot {action}{where}: {reason}")


def require(module: str) -> Any:
    """Imports a package of the ``bench`` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise UserError(f"{module.split('.')[0]} is not installed: {INSTALL}") from error


def output_folder(path: str | Path) -> Path:
    """Makes a folder and proves that it can be written to, before any work is done for it."""
    folder = Path(path).expanduser()
    probe = folder / ".write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"0" * 4096)
        probe.unlink()
    except OSError as error:
        raise os_error("write to", error) from error
    return folder


def write_text(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise os_error("write", error) from error
    return path


def closest(name: str, known: Iterable[str], count: int = 3) -> str:
    """`` (did you mean a, b?)``, or nothing where nothing is near."""
    near = get_close_matches(name, list(dict.fromkeys(known)), n=count, cutoff=0.5)
    return f" (did you mean {', '.join(near)}?)" if near else ""
