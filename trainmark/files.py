"""Files and folders that appear whole or not at all; folders that know how they were made."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainmark.errors import InputError

# --- files


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, durably."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing was
            temporary.unlink()
        error.filename, error.filename2 = str(path), None  # the one that the user knows
        raise


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


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- folders


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
    made_with = read_json(output / manifest).get("settings")
    if made_with is None:
        raise InputError(
            f"{output} is not empty and holds no {manifest}. Choose another --output, or remove it."
        )
    different = difference(made_with, settings)
    if different:
        raise InputError(
            f"{output} was made with other settings ({different}). "
            "Choose another --output, or remove it."
        )
    return True


def difference(made_with: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings that differ, in words; empty if none do."""
    now = json.loads(json.dumps(settings))
    return "; ".join(
        f"{key}: {_short(made_with.get(key))} there, {_short(now.get(key))} now"
        for key in sorted({*made_with, *now})
        if made_with.get(key) != now.get(key)
    )


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """A temporary sibling of `output` to write into; renamed to `output` at the end.

    An exception removes it. What a killed run left is removed by the next one.
    """
    output = Path(os.path.abspath(output))
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        # An existing empty folder is replaced; a filled one (another process) makes this fail.
        os.replace(partial, output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{output} cannot be written: {error.strerror or error}.") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty if there is no such file."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} should hold a JSON object; it holds a {type(data).__name__}.")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
