"""`python -m hal.model.train`: what `hal train` runs, for launchers that want a module, such as torchrun."""

from __future__ import annotations

import sys

from .training.run import main

if __name__ == "__main__":
    sys.exit(main())
