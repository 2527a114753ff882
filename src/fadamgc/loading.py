"""Objects from outside the package: ``"my_module:Name"``, or ``"path/to/file.py:Name"``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, cut, full_name, nearest, shown

_folders: list[str] = []  # in addition to the working folder: the folders of specs
_imported: list[str] = []  # modules and files, in the order in which they were imported


_provided: dict[str, Any] = {}  # objects of this process that no other process can import

_trusted: ContextVar[bool] = ContextVar("trusted", default=True)


@contextmanager
def untrusted() -> Iterator[None]:
    """Forbid imports in a ``with`` block that reads names from a file or from another machine."""
    token = _trusted.set(False)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Whether names may import modules."""
    return _trusted.get()


def provide(reference: str, value: Any) -> None:
    """Let ``load_object`` find an object that is not in a module, such as one of a notebook."""
    _provided.pop(reference, None)
    _provided[reference] = value


def reference_of(value: Any) -> str:
    """Return the name of a function, by which ``load_object`` finds it if it is in a module or provided."""
    return next((name for name in reversed(_provided) if _provided[name] is value), full_name(value))


def is_importable(value: Any) -> bool:
    """Whether another process can import a function or a class by its name."""
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "<>")
    if module == "__main__" or not str(name).isidentifier():
        return False
    return getattr(sys.modules.get(module), name, None) is value


def load_object(reference: str) -> Any:
    """Import a module or a file, and return an object in it.

    A file is imported once per process, under the name of the file. It is looked for in the working folder,
    then in the folder of the spec. A name that is not trusted must be in a module that is imported already.
    """
    if reference in _provided:
        return _provided[reference]
    place, name = _parts(reference)
    if is_trusted():
        return _named(load_module(place), place, name)
    module = sys.modules.get(Path(place).stem if place.endswith(".py") else place)
    if module is None:
        raise InputError(f"{shown(reference)} is not known here; import {shown(place)} first")
    return _named(module, place, name)


def load_module(place: str) -> Any:
    """Import a module by its name, or a file by its path."""
    module = _from_file(place) if place.endswith(".py") else _from_module(place)
    if place not in _imported:
        _imported.append(place)
    return module


def find_file(place: str) -> Path:
    """Return the path of a file, which is in the working folder or in the folder of the spec."""
    places = [Path(folder) / place for folder in ("", *_folders)]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        also = f" here or in {', '.join(_folders)}" if _folders and not Path(place).is_absolute() else ""
        raise InputError(f"there is no file {place!r}{also}")
    return path


def look_in(folder: Path) -> None:
    """Also search this folder for files and modules, before the folders that were added earlier."""
    if (path := str(folder.resolve())) in _folders:
        _folders.remove(path)
    _folders.insert(0, path)


def imports() -> tuple[list[str], list[str]]:
    """Return the arguments with which another process can call ``import_again``."""
    return list(_folders), list(_imported)


def import_again(folders: list[str], imported: list[str]) -> None:
    """Import the modules and files of another process; skip those that can no longer be imported."""
    for folder in reversed(folders):
        look_in(Path(folder))
    for place in imported:
        with suppress(InputError):
            load_module(place)


def _parts(reference: str) -> tuple[str, str]:
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise InputError(
            f"{shown(reference)} does not name an object; write 'my_module:Name' or 'path/to/file.py:Name'"
        )
    return place, name


def _named(module: Any, place: str, name: str) -> Any:
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise InputError(f"{place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _from_module(name: str) -> Any:
    for folder in reversed(["", *_folders]):  # "": the working folder
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise InputError(f"there is no module {name!r}; give the path of a file, or install it") from None
        raise InputError(f"{name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{name} cannot be imported: {type(error).__name__}: {cut(str(error))}") from error


def hidden_module(path: Path) -> str | None:
    """Return the file of another module of the same name, which this file would hide; None: there is none."""
    try:
        spec = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        return None
    if spec is None or (spec.origin is not None and Path(spec.origin).resolve() == path.resolve()):
        return None
    return spec.origin or path.stem


def _from_file(place: str) -> Any:
    path = find_file(place)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
        return known
    if (hidden := hidden_module(path)) is not None:
        raise InputError(f"{place!r} has the name of another module, {hidden}; rename the file")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(1, folder)  # for the modules in the same folder
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {cut(str(error))}") from error
    return module
