"""Imported before torch: two settings that torch and its OpenMP runtime read only once, when they are loaded.

Torch must not import vendors' packages by itself: where one is installed without its driver (for example torch_npu
without CANN), plain `import torch` would fail. HAL imports the package when its backend is requested, and then reports
what is missing.

libgomp's threads spin for milliseconds at every barrier by default. As soon as another process competes for the cores,
the spinning threads keep the one they wait for off the processor: training on 2 busy cores was measured at a sixth of
its speed. With the short spin that is set here, a thread still spins through the gap between two kernels, and yields
after it. Values that the user has set are not overwritten.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
