"""The trainer's half of a weight update over a process group.

Run it with the Python of SGLang's environment, which has torch. The arguments are the port to listen on, the size of
the world, the group's name, and a folder with weights for each update. It joins the group as rank 0. For each line that
it reads, it broadcasts the tensors of the next folder, sorted by name. With the arguments `tensors FOLDER` it only
prints the names, types and shapes of the tensors as JSON.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=60)


def read(folder: str) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(Path(folder, "model.safetensors")).items()))


def describe(folder: str) -> None:
    tensors = read(folder)
    json.dump(
        {
            "names": list(tensors),
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        },
        sys.stdout,
    )


def join(port: int, size: int, name: str) -> c10d.ProcessGroup:
    """Join a group besides torch's default one, under the names by which the engines find it."""
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def broadcast(port: str, size: str, name: str, *folders: str) -> None:
    updates = [read(folder) for folder in folders]
    group = join(int(port), int(size), name)
    for tensors, _ in zip(updates, sys.stdin, strict=False):
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=group)


if __name__ == "__main__":
    if sys.argv[1] == "tensors":
        describe(sys.argv[2])
    else:
        broadcast(*sys.argv[1:])
