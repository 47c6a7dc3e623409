"""Synchronous training waits for the slowest GPU: how much slower it is than an average one."""

from __future__ import annotations

from statistics import NormalDist

SPREAD = 0.05 / 2.85
"""Standard deviation of the rate of matrix products among GPUs of one product.

"5%+ MAMF spread between GPUs" on one node of eight (stas00/ml-engineering, compute/accelerator/README.md, Silicon
lottery); the range of eight normal numbers is 2.85 standard deviations. It agrees with an "average performance
variation of 8% across GPUs" of whole clusters (arXiv 2208.11035): the range of a hundred is 5.0 standard deviations."""


def slowest_of(num_gpus: int) -> float:
    """Return the expected rate of the slowest of some GPUs, by the average GPU's (Blom's approximation)."""
    if num_gpus < 2:
        return 1.0
    return 1.0 - SPREAD * NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))
