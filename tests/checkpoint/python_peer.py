# SPDX-License-Identifier: BSD-3-Clause
"""The other side of tests/checkpoint/import_test.cpp: reads what the library wrote, and writes what it must read.

usage: python_peer.py check FOLDER   FOLDER is a checkpoint of a Toy after one step of SGD
       python_peer.py make FOLDER    writes plain.safetensors, hf/, hf_shards/, dcp/, state.pt, ordered.pt and script.pt
Exit status 77: a package is missing (its name on stdout).
"""

import os
import sys

try:
    import numpy  # noqa: F401  (DCP needs it)
    import safetensors.torch
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

SHAPES = {"p0": (10,), "p1": (7, 5), "p2": (3, 4, 2, 2)}


def values(name):
    count = torch.Size(SHAPES[name]).numel()
    return torch.arange(count, dtype=torch.float32).reshape(SHAPES[name])


def require_equal(name, found, expected):
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        sys.exit(f"FAILED: {name} is {found}, expected {expected}")


def check(folder):
    after = {name: values(name) - 0.5 for name in SHAPES}  # lr 0.5, gradient 1
    weights = safetensors.torch.load_file(f"{folder}/model.safetensors")
    if set(weights) != set(SHAPES):
        sys.exit(f"FAILED: names {sorted(weights)}")
    for name, expected in after.items():
        require_equal(name, weights[name], expected)
    state = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    state.update({f"state.{name}.momentum_buffer": torch.empty(shape) for name, shape in SHAPES.items()})
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    for name, expected in after.items():
        require_equal(f"DCP's {name}", state[name], expected)
        require_equal(f"DCP's momentum of {name}", state[f"state.{name}.momentum_buffer"], torch.ones(SHAPES[name]))


def write_shards(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(values(name), mesh, [Shard(0)]) for name in SHAPES}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/hf_shards", save_distributed=True))
    dist.destroy_process_group()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, torch.nn.Parameter(values(name)))

    def forward(self, x):
        return x * self.p0.sum()


def make(folder):
    state = {name: values(name) for name in SHAPES}
    safetensors.torch.save_file(state, f"{folder}/plain.safetensors")
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/hf", fqn_to_index_mapping={"p0": 1, "p1": 1, "p2": 2})
    dcp.save(state, storage_writer=writer, no_dist=True)
    torch.multiprocessing.spawn(write_shards, args=(folder,), nprocs=2)
    dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    net = Net()
    torch.save({name: p.detach() for name, p in net.named_parameters()}, f"{folder}/state.pt")
    torch.save(net.state_dict(), f"{folder}/ordered.pt")  # an OrderedDict with attributes: beyond libtorch's reader
    torch.jit.script(net).save(f"{folder}/script.pt")


if __name__ == "__main__":
    {"check": check, "make": make}[sys.argv[1]](sys.argv[2])
    print("ok")
