"""Tensor parallelism by DTensor: heads of attentions and inner units of feed-forward layers divided among processes."""

from __future__ import annotations

from torch import nn

from retro_model.layers import Attention, FeedForward


def parallelize(module: nn.Module, mesh) -> nn.Module:
    """Divide a module's attentions and feed-forward layers over a mesh, in place. Every process calls it.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
        model = parallelize(Retro(config), mesh["tensor"])
        training.shard(model, mesh["data"])  # FSDP2 over this process's part of each parameter

    Each process has H/P heads (their query, key and value projections, u and v, the projection of their relative keys,
    their rows of the output projection) and d_ff/P units. Activations, norms, embeddings and the readout are whole in
    every process, and every process must get the same tokens. A layer does one all-reduce [B,N,d] in the forward pass
    and one for each projection of an input in the backward pass.

    With residual dropout, the processes of one mesh need the same generator state: seed by the place in other meshes.

    Args:
        module: a `Retro`, a `NeighbourEncoder`, a retrofitted decoder (its added layers are divided), or single layers.
        mesh: of one dimension; P divides the heads, the key-value heads and d_ff.

    Returns: The module.
    Raises: ValueError naming the layer that P does not divide. The module is then unchanged.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, e.g. mesh['tensor']; got {mesh.ndim}")
    attentions = {name: m for name, m in module.named_modules() if isinstance(m, Attention)}
    feed_forwards = {name: m for name, m in module.named_modules() if isinstance(m, FeedForward)}
    for name, layer in (attentions | feed_forwards).items():
        whole = (layer.num_heads, layer.num_kv_heads) if name in attentions else (layer.inner.out_features,)
        if any(size % mesh.size() for size in whole):
            what, got = "num_heads and num_kv_heads" if name in attentions else "d_ff", ", ".join(map(str, whole))
            raise ValueError(f"{name or 'module'}: expected {what} that {mesh.size()} processes divide; got {got}")
    for layer in attentions.values():
        _divide_heads(layer, mesh)
    for layer in feed_forwards.values():
        _divide(layer, mesh, ("inner",) if layer.gate is None else ("inner", "gate"))
    return module


def _divide(layer: nn.Module, mesh, columns: tuple[str, ...]) -> None:
    """Divide the linear maps `columns` by their outputs and `output` by its inputs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(layer, mesh, {name: ColwiseParallel() for name in columns} | {"output": RowwiseParallel()})
    layer.divided_among = mesh.size()  # a training step counts the tokens of these processes once


def _divide_heads(layer: Attention, mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    positions = getattr(layer, "positions", None)
    relative = isinstance(positions, nn.Module)
    _divide(layer, mesh, ("query", "key", "value", *(["positions.projection"] if relative else [])))
    for name in layer.head_parameters:
        bias = getattr(layer, name)
        divided = distribute_tensor(bias.detach(), mesh, [Shard(0)])
        setattr(layer, name, nn.Parameter(divided, requires_grad=bias.requires_grad))
    layer.num_heads //= mesh.size()
    layer.num_kv_heads //= mesh.size()
    if relative:
        positions.num_heads //= mesh.size()
