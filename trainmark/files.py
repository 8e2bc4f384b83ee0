"""Files and folders that appear whole or not at all; folders that know how they were made."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

from trainmark import checksums
from trainmark.errors import InputError, reason

# --- files


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, durably. What cannot be replaced, a device or a FIFO, gets it."""
    try:
        if _takes_bytes(path):
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
            return
        with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the one that the user knows
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a file to write, which then becomes `path`, durably; an exception removes it.

    Nobody else has this name: what lies there under a fixed one might be a link to another file.
    If `path` is a link, what it names is replaced, and it stays a link.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        yield temporary
        os.replace(temporary, target)
        fsync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing was
            temporary.unlink()
        raise


def unfinished(folder: Path) -> list[Path]:
    """Files in a folder that nobody will finish: whoever wrote them was killed."""
    return list(folder.glob(".*.writing"))


def _takes_bytes(path: Path) -> bool:
    """Whether `path` is written into, as /dev/null and /dev/stdout are, and not replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise InputError(f"{path} is a disk or a socket; expected a file to write to.")
    # What /dev/stdout names may be a file that a shell has opened: another one would not be it.
    is_descriptor = str(path.parent) in ("/dev", "/dev/fd", "/proc/self/fd")
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or is_descriptor


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file as Hugging Face's software expects it; a failure is an `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    # safetensors leaves the file to its owner alone; like any other it should be as umask says.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def reserve(path: Path) -> None:
    """Disk for the whole of a sparse file that is then written through memory: where the disk is
    full, this fails; later, SIGBUS would end the process."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NPY_ERRORS = (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError, TokenError)
"""What numpy raises for a damaged .npy file, whose header is Python."""


# --- folders

SIGNED = ("prepare.json", "npy.json")
"""They say how long it took, so that no two are alike, and have a checksum of their own."""


def is_finished(output: Path, manifest: str, settings: Mapping[str, Any]) -> bool:
    """True if `output` was already made with `settings`; an `InputError` if it is something else.

    Args:
        output: the folder to be made.
        manifest: name of the JSON file in it that holds, under "settings", how it was made.
        settings: how it would be made now.
    """
    if not output.exists():
        return False
    if not output.is_dir():
        raise InputError(f"{output} is a file; expected a folder to write to.")
    if not any(output.iterdir()):
        return False
    check_settings(output, manifest, read_json(output / manifest), settings)
    return True


def check_settings(
    output: object, manifest: str, found: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Refuse a folder that was not made with `settings`.

    Args:
        found: what its manifest says; nothing, if there is none.
    """
    if found.get("settings") is None:
        raise InputError(
            f"{output} is not empty and holds no {manifest}. Choose another --output, or remove it."
        )
    if different := difference(found["settings"], settings):
        raise InputError(
            f"{output} was made with other settings ({different}). "
            "Choose another --output, or remove it."
        )


def difference(made_with: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings that differ, in words; empty if none do."""
    now = json.loads(json.dumps(settings))
    return "; ".join(
        f"{key}: {_short(made_with.get(key))} there, {_short(now.get(key))} now"
        for key in sorted({*made_with, *now})
        if made_with.get(key) != now.get(key)
    )


@contextmanager
def building(output: Path, made_of: Any = None) -> Iterator[Path]:
    """A temporary folder beside `output` to write into; renamed to `output` at the end.

    One process at a time. An exception removes the folder; what a killed process left is removed
    by the next one. `made_of`: see `checksums.seal`.
    """
    output, beside = in_the_making(output, "partial")
    try:
        with locked(beside / "lock", f"Another process is writing {output} now."):
            try:
                shutil.rmtree(beside / "whole", ignore_errors=True)
                (beside / "whole").mkdir()
                yield beside / "whole"
                checksums.seal(beside / "whole", besides=SIGNED, made_of=made_of)
                # An existing empty folder is replaced; a filled one makes this fail.
                os.replace(beside / "whole", output)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {reason(error)}") from error


ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/")
"""How the address of another machine's file begins; `Path` takes one of its slashes."""


def refuse_address(output: Path) -> None:
    """Refuse an output on another machine, which would become a folder named s3: here."""
    if found := ADDRESS.match(str(output)):
        raise InputError(
            f"{output} is an address of {found[1]}:; expected a folder of this machine, which may "
            "be copied there afterwards."
        )


def in_the_making(output: Path, kind: str) -> tuple[Path, Path]:
    """A folder to be written, of a link what it names, and the folder beside it that becomes it.

    Refused is what cannot be replaced, would be gone from under a shell, or is no path of this
    machine: before the work, not after it.
    """
    refuse_address(output)
    output = Path(os.path.realpath(output))
    is_empty = output.is_dir() and not any(output.iterdir())
    is_here = is_empty and os.path.samefile(output, ".")
    if is_here or (is_empty and os.path.ismount(output)):
        what = "the folder that you are in" if is_here else "where a disk is mounted"
        raise InputError(
            f"{output} is {what}; expected a folder that can appear when it is whole, "
            f"such as {output / 'data'}."
        )
    return output, output.parent / f".{output.name}.{kind}"


def locked(path: Path, otherwise: str) -> BinaryIO:
    """Hold the lock file `path` until it is closed, or the process ends, however it does.

    Args:
        otherwise: the sentence for a process that finds it held.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # links are not followed, and nothing is emptied: it may be anything
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another process has just finished, and removed the folder
            continue
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                file.close()
                raise InputError(otherwise) from None
            return file  # some network file systems know no locks
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return file
        file.close()  # it was removed, too


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty if there is no such file."""
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} should hold a JSON object; it holds a {type(data).__name__}.")
    return checksums.checked(data, path)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """With a checksum, which `read_json` checks."""
    path.write_text(checksums.dumps(data))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
