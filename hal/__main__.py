"""`python -m hal` is the command `hal`, for launchers that start a module: `torchrun -m hal train ...`."""

import sys

from hal.cli import main

if __name__ == "__main__":
    sys.exit(main())
