"""What `torch.export` records, read: names of calls, pairs of numbers, which tensors are one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def call_of(node: torch.fx.Node) -> str:
    """The call's name; "aten.relu_.default" is "aten.relu.default" in place."""
    return str(node.target).replace("_.", ".").replace("<built-in function getitem>", "getitem")


def names_by_tensor(module: torch.nn.Module) -> dict[str, list[str]]:
    """For every parameter and buffer, all names the same tensor goes by."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    # By memory, not by object: `a.data = b.data` shares as well.
    addresses = {name: tensor.data_ptr() or id(tensor) for name, tensor in tensors}
    owners: dict[int, list[str]] = {}
    for name, address in addresses.items():
        owners.setdefault(address, []).append(name)
    return {name: owners[address] for name, address in addresses.items()}
