"""Imported before torch: two settings that torch and its OpenMP runtime read only once, when they are loaded.

Torch must not import vendors' packages by itself: where one is installed without its driver (torch_npu without CANN,
say), plain `import torch` would fail. HAL imports it when its backend is asked for, and then says what is missing.

libgomp's threads spin for milliseconds at every barrier by default. As soon as anything else runs on the machine, the
thread they wait for has no processor: training on 2 busy cores was measured at a sixth of its speed. A short spin
outlasts the gap between two kernels and then yields. Values the user has set are left alone.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
