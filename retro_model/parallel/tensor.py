"""Tensor parallelism: heads of attentions and inner units of feed-forward layers divided among processes, by
DTensor."""

from __future__ import annotations

from torch import nn

from retro_model.layers import Attention, FeedForward


def parallelize(module: nn.Module, mesh) -> nn.Module:
    """Divides a module's attentions and feed-forward layers over a mesh, in place; every process calls.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
        model = parallelize(Retro(config), mesh["tensor"])
        training.shard(model, mesh["data"])  # FSDP2 over what is left of each parameter

    Each process has H/P heads: their queries, keys and values, u and v, the map of their relative keys, and the rows of
    the output projection that read them; and d_ff/P units. Activations, norms, embeddings and the readout are whole in
    every process, and all must be given the same tokens. One all-reduce [B,N,d] a layer forward; in the backward pass
    one for each projection of an input.

    Processes of one mesh must have the same generator state where residual dropout is used; seed them by their place in
    the other meshes.

    Args:
        module: a `Retro`, a `NeighbourEncoder`, a retrofitted decoder (what was added to it), or single layers.
        mesh: of one dimension; P divides the heads, the key-value heads and d_ff.

    Returns:
        The module.

    Raises:
        ValueError: naming the layer that P does not divide; nothing is changed.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, e.g. mesh['tensor']; got {mesh.ndim}")
    attentions = {name: m for name, m in module.named_modules() if isinstance(m, Attention)}
    feed_forwards = {name: m for name, m in module.named_modules() if isinstance(m, FeedForward)}
    for name, layer in (attentions | feed_forwards).items():
        whole = (layer.num_heads, layer.num_kv_heads) if name in attentions else (layer.inner.out_features,)
        if any(size % mesh.size() for size in whole):
            what = "num_heads and num_kv_heads" if name in attentions else "d_ff"
            raise ValueError(
                f"{name or 'module'}: expected {what} that {mesh.size()} processes divide; got "
                f"{', '.join(map(str, whole))}"
            )
    for layer in attentions.values():
        _divide_heads(layer, mesh)
    for layer in feed_forwards.values():
        _divide(layer, mesh, ("inner",) if layer.gate is None else ("inner", "gate"))
    return module


def _divide(layer: nn.Module, mesh, columns: tuple[str, ...]) -> None:
    """The linear maps `columns` by their outputs, `output` by its inputs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(layer, mesh, {name: ColwiseParallel() for name in columns} | {"output": RowwiseParallel()})
    layer.divided_among = mesh.size()  # these processes read the same tokens, and a step counts them once


def _divide_heads(layer: Attention, mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    positions = getattr(layer, "positions", None)
    relative = isinstance(positions, nn.Module)
    _divide(layer, mesh, ("query", "key", "value", *(["positions.projection"] if relative else [])))
    for name in layer.head_parameters:
        bias = getattr(layer, name)
        setattr(
            layer,
            name,
            nn.Parameter(distribute_tensor(bias.detach(), mesh, [Shard(0)]), requires_grad=bias.requires_grad),
        )
    layer.num_heads //= mesh.size()
    layer.num_kv_heads //= mesh.size()
    if relative:
        positions.num_heads //= mesh.size()
