"""Keeps today's stable names as those of a release: `python scripts/reference/released_names.py 0.2.0`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference import tiers
from scripts.reference.hooks import made_reference

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tiers.write(made_reference().names, sys.argv[1])
    print(f"{tiers.RELEASED.name} has the stable names of {sys.argv[1]}")
