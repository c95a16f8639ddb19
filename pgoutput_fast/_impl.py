"""The one place that chooses the implementation: Cython where it was built, Python otherwise.

The environment variable PGOUTPUT_FAST_IMPL forces one, ``cython`` or ``python``.
"""

from __future__ import annotations

import importlib
import os
import platform
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from . import views

_MODULES = {"cython": "pgoutput_fast._core", "python": "pgoutput_fast._pure"}


def _choose() -> tuple[ModuleType, str | None]:
    """The module to use, and why it is not the extension where nobody asked for that."""
    forced = os.environ.get("PGOUTPUT_FAST_IMPL", "").strip().lower()
    if forced:
        if forced not in _MODULES:
            raise ImportError(f"PGOUTPUT_FAST_IMPL={forced!r}: expected 'cython' or 'python'")
        try:
            return importlib.import_module(_MODULES[forced]), None
        except ImportError as error:
            raise ImportError(
                f"PGOUTPUT_FAST_IMPL={forced} asks for {_MODULES[forced]}, which cannot be "
                f"imported: {error}. Install a wheel, or build with PGOUTPUT_FAST_REQUIRE_EXT=1 to "
                "see why the build fails."
            ) from error
    try:
        return importlib.import_module(_MODULES["cython"]), None
    except ImportError as error:
        where = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would double the import's time
        reason = f"the compiled extension cannot be imported from {where}: {error}"
    if platform.python_implementation() == "CPython":
        warnings.warn(
            f"pgoutput_fast is slow: {reason}; PGOUTPUT_FAST_IMPL=python says that this is meant",
            RuntimeWarning,
            stacklevel=4,
        )
    return importlib.import_module(_MODULES["python"]), reason


def twin(name: str, implementation: str | None = None) -> ModuleType:
    """A module that exists twice, as the implementation has it.

    Parameters
    ----------
    name : str
        Of the compiled one, below this package: ``columnar._engine`` lies beside its twin
        ``columnar._pure_engine``.
    implementation : {"cython", "python"}, optional
        The one that was chosen, without.
    """
    if (implementation or IMPLEMENTATION) == "python":
        package, _, module = name.rpartition("._")
        name = f"{package}._pure_{module}"
    return importlib.import_module(f"{__package__}.{name}")


__all__ = ["FALLBACK_REASON", "IMPLEMENTATION", "implementation", "twin"]

if TYPE_CHECKING:  # type checkers read the twin
    from . import _pure as implementation

    FALLBACK_REASON: str | None
    IMPLEMENTATION: str
else:
    implementation, FALLBACK_REASON = _choose()
    # What is pickled is restored by the implementation that is chosen here.
    views.chosen = implementation
    IMPLEMENTATION = implementation.IMPLEMENTATION
