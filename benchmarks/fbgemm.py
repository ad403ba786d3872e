"""FBGEMM as a peer: its trainer, the way its own users would write it, and whether it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from peers import find_peer
from torch import Tensor

from speedswap._words import pip_install
from speedswap.apps.bench.measure import IdBatch, Peer
from speedswap.apps.bench.step import LEARNING_RATE, Contestant

__all__ = ["Fbgemm", "contestants", "step_peers"]


class Fbgemm:
    """FBGEMM's table-batched bags of one id each, summed: its backward pass is the optimizer's step.

    Lookups without pooling (``PoolingMode.NONE``) give the same rows and take twice as long on the CPU. On a GPU the
    rows stay in host memory that the GPU reads and writes, or if ``near`` on the GPU.
    """

    def __init__(
        self, num_rows: int, dim: int, optimizer: str, device: str, *, tables: int = 1, near: bool = False
    ) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD, "adam": EmbOptimType.ADAM}
        places = tbe.EmbeddingLocation
        location = places.HOST if device == "cpu" else places.DEVICE if near else places.MANAGED
        compute = tbe.ComputeDevice.CPU if device == "cpu" else tbe.ComputeDevice.CUDA
        self.embedding = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, location, compute)] * tables,
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE[optimizer],
            eps=1e-8 if optimizer == "adam" else 1e-10,  # torch's
            pooling_mode=tbe.PoolingMode.SUM,
            **({"uvm_host_mapped": True} if location == places.MANAGED else {}),
        )
        for weights in self.tables():
            weights.uniform_(-0.1, 0.1)

    def tables(self) -> list[Tensor]:
        """Return the weights of each table."""
        return [weights.detach() for weights in self.embedding.split_embedding_weights()]

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        offsets = torch.arange(len(grad) + 1, device=grad.device)
        for batch in batches:
            self.embedding(batch.near, offsets).backward(grad)
            yield

    def load(self, weights: Tensor) -> None:
        self.tables()[0].copy_(weights)

    def weights(self) -> Tensor:
        return self.tables()[0].to("cpu", copy=True)

    def close(self) -> None:
        del self.embedding


def step_peers(device: str) -> dict[str, Peer]:
    """Find the libraries that train an embedding."""
    # FBGEMM is built for one torch release, which its metadata does not name: the extra names both.
    for_cpu = pip_install("fbgemm-gpu-cpu", "torch", extra="benchmarks")
    remedy = for_cpu if device == "cpu" else "pip install the fbgemm-gpu of this torch"
    return {
        "torch": Peer(torch.__version__),
        "FBGEMM": find_peer(
            "fbgemm_gpu.split_table_batched_embeddings_ops_training",
            "fbgemm-gpu-cpu" if device == "cpu" else "fbgemm-gpu",
            remedy,
        ),
    }


def contestants(optimizer: str, device: str) -> list[Contestant]:
    """Return FBGEMM's trainer of this optimizer, which its CPU build has not for Adam."""
    return [] if optimizer == "adam" and device == "cpu" else [Contestant("FBGEMM", "FBGEMM", Fbgemm)]
