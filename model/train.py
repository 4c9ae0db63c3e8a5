"""`python -m hal.model.train`: `hal train` as a module, for launchers like torchrun."""

from __future__ import annotations

import sys

from .training.run import main

if __name__ == "__main__":
    sys.exit(main())
