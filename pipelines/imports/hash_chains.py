"""Prefix chains from per-block hash ids of any size."""

from dataclasses import dataclass

import numpy as np

from learn.trace import Ints
from pipelines.imports.rows import Chains, Mask


@dataclass(frozen=True)
class HashChains:
    """Each row's blocks as nodes of the tree of prefixes: a node is an id together with all ids before it.

    moved: (n_rows,) rows with an id that an earlier row had after another prefix.
    """

    nodes: list[list[int]]
    n_nodes: int
    moved: Mask

    def of(self, rows: Ints, hash_block_tokens: int) -> Chains:
        """Chains of `rows`: the leading blocks that another of these rows shares, with ids dense from 0."""
        uses = np.zeros(self.n_nodes, np.int64)
        chosen = [np.array(self.nodes[row], np.int64) for row in rows.tolist()]
        for chain in chosen:
            uses[chain] += 1  # a node occurs once in a chain
        # A node is used at least as often as those after it, so the shared ones lead.
        shared = [chain[uses[chain] > 1] for chain in chosen]
        lengths = np.array([len(chain) for chain in shared], np.int64)
        flat = np.concatenate(shared) if shared else np.zeros(0, np.int64)
        block_ids = np.unique(flat, return_inverse=True)[1].astype(np.int64)
        return Chains(np.cumsum(lengths) - lengths, lengths, block_ids, hash_block_tokens)


def build_chains(hash_ids: list[list[int]], usable: Mask) -> HashChains:
    """Nodes of every usable row. Ids are compared as whole integers of any size, never shortened."""
    node_of: dict[tuple[int, int], int] = {}
    parent_of: dict[int, int] = {}
    moved = np.zeros(len(hash_ids), bool)
    nodes: list[list[int]] = []
    for row, ids in enumerate(hash_ids):
        chain: list[int] = []
        parent = -1
        for block in ids if usable[row] else ():
            if parent_of.setdefault(block, parent) != parent:
                moved[row] = True
            parent = node_of.setdefault((parent, block), len(node_of))
            chain.append(parent)
        nodes.append(chain)
    return HashChains(nodes, len(node_of), moved)
