"""Size: an integer of a recording that depends on the sizes of the model and the batch, as a sum of products."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


class Size(int):
    """A size. Recordings at several points tell which formula each factor follows."""

    terms: tuple[tuple[int, ...], ...]
    """The factors of each product."""

    @classmethod
    def sum_of(cls, terms: Iterable[Iterable[int]]) -> Size:
        """Return a sum of products."""
        plain = tuple(tuple(int(factor) for factor in term) for term in terms)
        made = cls(sum(math.prod(term) for term in plain))
        made.terms = plain
        return made

    @classmethod
    def product(cls, *factors: int) -> Size:
        """Return a product."""
        return cls.sum_of([factors])

    @classmethod
    def of_storage(cls, tensor: torch.Tensor) -> Size:
        """Return the bytes of a tensor's storage; as its shape where it fills the storage."""
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == tensor.numel() * tensor.element_size():
            return cls.product(*tensor.shape, tensor.element_size())
        return cls.product(num_bytes)
