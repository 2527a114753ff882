"""Objects from outside the package: ``"my_module:Name"``, or ``"path/to/file.py:Name"``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, cut, nearest, shown


def load_object(reference: str) -> Any:
    """Import a module or a file, and return an object in it.

    A file is imported once per process, under the name of the file.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise InputError(
            f"{shown(reference)} does not name an object; write 'my_module:Name' or 'path/to/file.py:Name'"
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise InputError(f"{place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _from_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the command's own folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise InputError(f"there is no module {name!r}; give the path of a file, or install it") from None
        raise InputError(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise InputError(f"{name} cannot be imported: {type(error).__name__}: {cut(str(error))}") from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {cut(str(error))}") from error
    return module
