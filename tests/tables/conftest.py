"""Shared by the tests of tables."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for id_map_model.py, which has no tests
