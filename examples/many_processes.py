"""Share a run among processes: all make the same call, and all get the result of one process.

torchrun --nproc-per-node 2 examples/many_processes.py
torchrun --nproc-per-node 8 -m neuromanifold estimate -m roberta-large-mnli -d pairs.csv -o fisher.safetensors
"""

import os

import small
import torch
import torch.distributed as dist

import neuromanifold as nm

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = small.network(epochs=0)  # the same on all processes
data = small.images(256)  # all of the data; batches are dealt by their index

fim = nm.fisher_diagonal(torch.nn.parallel.DistributedDataParallel(model), data)
if dist.get_rank() == 0:
    alone = nm.fisher_diagonal(model, data, distributed=False)
    print(f"{fim.provenance.processes} processes, {fim.count} samples: tr F = {fim.trace.value:.4f}")
    print(f"one process: {alone.trace.value:.4f}")
dist.barrier()
dist.destroy_process_group()
