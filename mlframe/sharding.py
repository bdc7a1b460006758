"""FSDP2: every weight, gradient and moment split over the processes, through Lightning's ModelParallelStrategy.

trainer/fsdp2.yaml -> FSDP2.shard(network)       each layer is a group of its own, gathered when it is computed
                      transition                 each tensor is gathered, mapped and split again, one at a time
                      FSDP2.save_checkpoint      a folder of shards, which any number of processes reads back
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mlframe.axes import Architecture

if TYPE_CHECKING:
    from mlframe.module import LevelModule

_PARKED = "parked."


class FSDP2(ModelParallelStrategy):
    """Lightning's strategy for fully sharded training (torch's fully_shard), over all processes.

    sharded_checkpoints: each process writes its own shards into the folder last.ckpt; False gathers everything in the
    memory of process 0 and writes one file.  kwargs: Lightning's own (process_group_backend, timeout).
    """

    def __init__(self, sharded_checkpoints: bool = True, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=sharded_checkpoints, **kwargs)
        self.sharded_checkpoints = sharded_checkpoints

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.root_device.type, (self.world_size,))

    @property
    def module(self) -> LevelModule:
        module: Any = self.lightning_module
        return module

    def build(self, module: LevelModule, fresh: bool) -> nn.Module:
        """The network of the module's phase in shards: process 0's random init where it is `fresh`, else memory only.

        Only process 0 ever holds the whole init, in the memory of the CPU; the others get their shards one by one.
        """
        first = module.built() if fresh and self.global_rank == 0 else None
        with parameters_on_meta():
            network = module.level.build()
        for layer in layer_modules(network, module.level.architecture):
            fully_shard(layer, mesh=self.mesh)
        fully_shard(network, mesh=self.mesh)
        device = self.root_device
        network._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device))
        if fresh:
            whole = first.state_dict() if first is not None else {}
            for name, shard in network.state_dict().items():
                _spread(whole.get(name), shard)
        network.through = lambda step, *args: step(*args)  # type: ignore[assignment]
        register_fsdp_forward_method(network, "through")
        return network

    # A task calls parts of the network, such as a trunk and then a head: its whole step is a forward to FSDP2.
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().training_step, *args, *kwargs.values())

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().validation_step, *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(super().test_step, *args, *kwargs.values())

    def _through(self, step: Callable[..., Any], *args: Any) -> Any:
        network: Any = self.module.network
        return network.through(step, *args)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Written beside and renamed, so that the old checkpoint is whole until the new one is."""
        parked = checkpoint["vcycle"]["parked"]
        if not self.sharded_checkpoints:
            checkpoint["vcycle"]["parked"] = {level: whole_state(state) for level, state in parked.items()}
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        for level, state in parked.items():
            checkpoint["state_dict"] |= {f"{_PARKED}{level}.{name}": x for name, x in state.items()}
        checkpoint["vcycle"]["parked"] = {level: {} for level in parked}
        path = Path(self.broadcast(filepath))
        beside = path.with_name(f".{path.name}.part")
        if self.is_global_zero:
            shutil.rmtree(beside, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, beside, storage_options)
        self.barrier()
        if self.is_global_zero:
            replace_folder(beside, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        parked: dict[str, dict[str, Tensor]] = checkpoint["vcycle"]["parked"]
        for level, state in parked.items():
            shards = self._empty(self.module.plan.levels[int(level)].build)
            if state:
                for name, shard in shards.items():
                    local(shard).copy_(part(state[name], shard))
            else:
                named = {f"{_PARKED}{level}.{name}": shard for name, shard in shards.items()}
                load_shards({"state_dict": named}, checkpoint_id=self.broadcast(checkpoint_path))
            parked[level] = shards
        return checkpoint

    def _empty(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        """Room on the CPU for this process's shards of a network."""
        with torch.device("meta"):
            network = build()
        parameters = dict(network.named_parameters())
        rest = {name: torch.empty_like(x, device="cpu") for name, x in network.state_dict().items()
                if name not in tied_names(network)}  # fmt: skip
        return rest | {name: _room(x, self.mesh) for name, x in parameters.items()}


def layer_modules(network: nn.Module, architecture: Architecture) -> list[nn.Module]:
    """The network's layers, as its architecture's table names them."""
    paths: dict[str, None] = {}
    for match in architecture.match(network.state_dict()).values():
        if match.layer is not None:
            paths[match.pattern.split("{layers}")[0] + str(match.layer)] = None
    return [network.get_submodule(path) for path in paths]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Networks are built without memory for their parameters; their buffers are as ever (some are constants)."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Whole(Mapping[str, Tensor]):
    """A state dict in shards, each tensor gathered when it is asked for. All processes must ask in the same order."""

    def __init__(self, shards: Mapping[str, Tensor], device: torch.device) -> None:
        self.shards, self.device = shards, device

    def __getitem__(self, name: str) -> Tensor:
        return _whole(self.shards[name], self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def _whole(x: Tensor, device: Any) -> Tensor:
    x = x.to(device)
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, unless it is in shards."""
    return x.to_local() if isinstance(x, DTensor) else x


def part(x: Tensor, like: Tensor) -> Tensor:
    """This process's part of the whole tensor `x`, split as `like` is."""
    return _chunk(x, like.device_mesh) if isinstance(like, DTensor) else x


def _chunk(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """fully_shard splits the first dimension, and the last processes may get nothing of it."""
    chunks, rank = x.chunk(mesh.size()), mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else x[:0]


def tied_names(network: nn.Module) -> dict[str, str]:
    """Names whose parameter is that of an earlier name, such as a head that is the embedding: name -> earlier name."""
    first: dict[nn.Parameter, str] = {}
    named = network.named_parameters(remove_duplicate=False)
    return {name: earlier for name, x in named if (earlier := first.setdefault(x, name)) != name}


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of `state` in the memory of process 0's CPU, and {} elsewhere. Every process must call it."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    out: dict[str, Tensor] = {}
    for name, x in state.items():
        whole = _whole(x, x.device_mesh.device_type) if isinstance(x, DTensor) else x
        if first:
            out[name] = whole.detach().cpu()
    return out


def replace_folder(beside: Path, path: Path) -> None:
    """`beside` becomes `path`. A folder cannot be replaced in one move: `recover` mends a kill between the two."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(beside, path)
    shutil.rmtree(old, ignore_errors=True)


def recover(path: Path) -> None:
    """Put back the checkpoint that `replace_folder` had moved away when it was killed."""
    old = path.with_name(f".{path.name}.old")
    if not path.exists():
        with suppress(FileNotFoundError):  # there is none, or another process of the run was first
            os.replace(old, path)


def _spread(whole: Tensor | None, shard: Tensor) -> None:
    """Process 0's `whole` tensor into every process's shard."""
    if isinstance(shard, DTensor):
        device = shard.device_mesh.device_type
        full = whole.to(device) if whole is not None else torch.empty(shard.shape, dtype=shard.dtype, device=device)
        shard.to_local().copy_(distribute_tensor(full, shard.device_mesh, shard.placements).to_local())


def _room(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """An empty tensor of x's shape in shards, on the CPU."""
    mine = torch.empty_like(_chunk(x, mesh), device=mesh.device_type)
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()).cpu()
