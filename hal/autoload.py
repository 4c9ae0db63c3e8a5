"""Imported before torch: keeps torch from importing vendors' packages by itself.

Where such a package is installed without its driver (torch_npu without CANN, say), plain `import torch` fails. HAL
imports a vendor's package when its backend is asked for, and then says what is missing.
"""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
