"""HAL: one GPT, any accelerator.

`hal.use("cpu_ref")` chooses the backend; `hal.ops` holds the operations; a third party adds hardware by subclassing
`hal.Backend`. The public names are those of `hal/public.py`. They are loaded when the first one is used, so that
`import hal` does not import torch, and `hal --help` starts quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import autoload  # noqa: F401  before anything that imports torch

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__


def __getattr__(name: str) -> Any:
    """Loads all public names at the first use of one (PEP 562); called for names that this module does not have yet."""
    # The import system asks for names such as __path__ and __file__ while the package itself is being imported.
    if not name.startswith("__") or name == "__all__":
        public = importlib.import_module(f"{__name__}.public")
        globals().update({public_name: getattr(public, public_name) for public_name in public.__all__})
        globals()["__all__"] = public.__all__
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
