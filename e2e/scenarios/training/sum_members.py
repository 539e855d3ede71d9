"""A training of PyTorch: members add their numbers by gloo; the first attempt goes on until one is gone."""

import os
import sys
import time

import torch
from torch import distributed

distributed.init_process_group("gloo")
number = torch.ones(1) * (distributed.get_rank() + 1)
distributed.all_reduce(number)
attempt = os.environ["FENKA_RESTARTS"]
sys.stdout.write(f"rank={distributed.get_rank()} sum={int(number)} attempt={attempt}\n")
while attempt == "0":
    distributed.all_reduce(number)
    time.sleep(0.2)
