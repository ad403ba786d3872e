"""What the tests of the kernels share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # host_library.py and philox_reference.py are no tests
