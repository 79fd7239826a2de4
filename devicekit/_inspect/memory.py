"""How much memory tensors hold; what they share is counted once."""

# pyright: reportPrivateUsage=false
# Of torch: the public ways to its stores are slow.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["block_of", "blocks_of"]

Block = tuple[int, int]

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def blocks_of(tensor: Tensor) -> Iterator[Block]:
    """Yield the blocks of memory that a tensor holds: what tells each from others, and its bytes.

    Sparse and nested tensors and wrapper subclasses hold those of their parts.
    """
    if is_lazy(tensor):
        return
    methods = _PARTS.get(tensor.layout)
    if methods is not None:
        for method in methods:
            yield from blocks_of(getattr(tensor, method)())
        return
    if hasattr(tensor, "__tensor_flatten__"):
        wrapper: Any = tensor
        for name in wrapper.__tensor_flatten__()[0]:
            part: object = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor has its device mesh among them
                yield from blocks_of(part)
        return
    yield block_of(tensor)


def block_of(tensor: Tensor) -> Block:
    """Return the one block of a tensor that has one."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # opaque: of MKL-DNN, or inside `vmap`
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()
