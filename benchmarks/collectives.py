"""How fast are our collectives, next to Gloo and to the bytes that must move?

    python benchmarks/collectives.py --ranks 4 -b 8 -e 128M -f 4
    python benchmarks/collectives.py --ranks 4 --footprint

The same as `python -m torch_gpumode bench collectives`, except that rows are also appended to
benchmarks/results/.
"""

import sys
from pathlib import Path

from torch_gpumode.bench import collectives

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    sys.exit(collectives.main(sys.argv[1:], RESULTS))
