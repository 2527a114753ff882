"""Bad input of every kind, made from a seed: specs, arguments, data files, caches, run folders.

python -m tests.fuzz --seed 0 specs=20000 arguments=5000 data=3000 cache=500 folders=3000
python -m tests.fuzz --seed 0 --case specs:1234

A case fails if anything comes out of it but a FadamgcError (at the command line: a message and an exit code),
if it takes longer than its limit, if its process dies, or if damaged files are read as other data. A case is
a function of target, seed and number alone, so those three are a reproduction.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the tests' own helpers are
