"""Tile sizes of the GPU kernels: a shipped table, and entries tuned on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.quant import KVCodec


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shipped_tile(kernel: str, kv_dtype: str, head_dim: int) -> Tile:
    return Tile(64 if kernel != "decode" else 16, 64, 4, 3)

def candidates(*a): return ()

def find_tile(kernel: str, codec: KVCodec, group: int, device: torch.device) -> Tile:
    return shipped_tile(kernel, codec.k_format.name, codec.k_format.head_dim)
