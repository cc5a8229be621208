import sys
from pathlib import Path

HERE = Path(__file__).resolve()
for path in (HERE.parents[3], HERE.parents[1], HERE.parent):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
