"""Choose the implementation: Cython if the extension was built, else Python.

The environment variable PGOUTPUT_FAST_IMPL forces ``cython`` or ``python``. No other module asks
which implementation is in use.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from .decoding import views

_MODULES = {"cython": "pgoutput_fast.decoding._core", "python": "pgoutput_fast.decoding._pure"}


def _choose() -> tuple[ModuleType, str | None]:
    """Return the module to use, and the reason if it is the Python one without a request."""
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
    if sys.implementation.name == "cpython":
        warnings.warn(
            f"pgoutput_fast is slow: {reason}; PGOUTPUT_FAST_IMPL=python says that this is meant",
            RuntimeWarning,
            stacklevel=4,
        )
    return importlib.import_module(_MODULES["python"]), reason


def twin(name: str, implementation: str | None = None) -> ModuleType:
    """Import one of the modules that exist in both implementations.

    Parameters
    ----------
    name : str
        The compiled module's name below this package. The Python twin of ``columnar._engine`` is
        ``columnar._pure_engine``.
    implementation : {"cython", "python"}, optional
        The implementation; by default the chosen one.

    Raises
    ------
    ImportError
        The module does not exist.
    """
    if (implementation or IMPLEMENTATION) == "python":
        package, _, module = name.rpartition("._")
        name = f"{package}._pure_{module}"
    return importlib.import_module(f"{__package__}.{name}")


__all__ = ["FALLBACK_REASON", "IMPLEMENTATION", "implementation", "twin"]

if TYPE_CHECKING:  # type checkers read the Python implementation
    from .decoding import _pure as implementation

    FALLBACK_REASON: str | None
    IMPLEMENTATION: str
else:
    implementation, FALLBACK_REASON = _choose()
    # Pickled messages and decoders are restored by this implementation.
    views.chosen = implementation
    IMPLEMENTATION = implementation.IMPLEMENTATION
