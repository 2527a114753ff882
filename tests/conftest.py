import torch

# One thread a process: the suite runs in two processes on two cores.
torch.set_num_threads(1)
