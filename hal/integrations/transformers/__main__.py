"""transformers' command line on HAL: `python -m hal.integrations.transformers serve FOLDER [options of transformers]`.

--backend NAME (default: $HAL_BACKEND) and --simulate are HAL's; everything else is transformers'. Every model that the
server loads is converted, and the conversion printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import hal


def main(argv: list[str]) -> None:
    """Runs transformers' command line. Exit code 2 for wrong usage and for HAL's errors."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", default=os.environ.get("HAL_BACKEND") or None)
    parser.add_argument("--simulate", action="store_true")
    own, theirs = parser.parse_known_args(argv)
    try:
        if own.backend is None:
            raise hal.HalError(f"no backend was chosen; give --backend, one of {', '.join(hal.backend_names())}")
        if theirs[:1] == ["serve"] and "--attn-implementation" in theirs:
            raise hal.HalError("--attn-implementation would be ignored: models that this command loads run on HAL's")
        options: dict[str, Any] = {"simulate": True} if own.simulate else {}
        hal.use(own.backend, **options)
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.cli.transformers import app

        from . import convert
    except (hal.HalError, ImportError) as error:
        hint = "" if isinstance(error, hal.HalError) else " (pip install 'torch-hal[serve]')"
        sys.exit(f"hal.integrations.transformers: {error}{hint}")

    load = ModelManager._load_model

    def load_converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        convert(model)
        return model

    ModelManager._load_model = load_converted  # type: ignore[method-assign]
    if theirs[:1] == ["serve"] and "--device" not in theirs:
        theirs += ["--device", str(hal.local_device())]
    app(theirs, prog_name="python -m hal.integrations.transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
