import os

import torch

from fadamgc.cache import code_folder

# One thread a process: the suite runs in two processes on two cores.
torch.set_num_threads(1)

# Tests have caches of their own; what torch compiles is shared between them, since it takes long.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(code_folder() / "torch"))
