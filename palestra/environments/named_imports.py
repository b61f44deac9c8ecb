"""Classes and functions of users by name, `package.module:Name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from palestra.environments.guarded_calls import error_text, place_of
from palestra.util.suggest import nearest


class NamedImportError(ValueError):
    """Nothing can be imported by this name; the message says why."""


def import_named(path: str, kind: Literal["class", "function"]) -> Callable[..., Any]:
    """Imports a class or a function. Raises NamedImportError, with the nearest name of the same kind."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise NamedImportError(f"{module_name!r} is not a module name")
    if (here := str(Path.cwd())) not in sys.path:
        # finds a script beside the config; the path of a command does not include the current folder
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NamedImportError(
            f"no module {error.name!r} here\n  its folder should be the current one, or in PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise NamedImportError(
            f"importing {module_name} raised {error_text(error)}{place_of(error, __file__)}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        file = getattr(module, "__file__", None) or module_name  # a folder without __init__.py has none
        is_class = kind == "class"
        known = [name for name, one in vars(module).items() if callable(one) and isinstance(one, type) is is_class]
        near = nearest(attribute, known)
        hint = f"\n  did you mean: {near}?" if near else ""
        raise NamedImportError(f"no {kind} {attribute!r} in {file}{hint}")
    return found
