"""Which documents share a sequence, in which order the sequences come, and what a packed sequence looks like.

Documents of a pack never see each other: attention goes by `segments`, and positions begin anew with each document, so
that a packed document gives the loss and the gradients that it gives alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npurt.data.corpus import IGNORED, Corpus, Int32, Int64

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the increment of splitmix64


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One training sequence; all arrays are int32 (S,).

    tokens -- ids; 0 at padding, where they mean nothing.
    positions -- 0, 1, 2, … within each document; 0 at padding.
    segments -- 1 for the first document, 2 for the next, …; 0 at padding. Position i may attend to j where
        `j <= i and segments[i] == segments[j]`; so padding attends to padding, and no row of the mask is empty.
    labels -- the token to predict at each position, `IGNORED` where none.

        tokens     a0 a1 a2 b0 b1  0        attention   a0 x
        positions   0  1  2  0  1  0                    a1 x x
        segments    1  1  1  2  2  0                    a2 x x x
        labels     a1 a2  .  b1 .  .                    b0       x
                                                        b1       x x
    """

    tokens: Int32
    positions: Int32
    segments: Int32
    labels: Int32

    @property
    def supervised(self) -> int:
        """Positions with a label: what the sum of losses is divided by."""
        return int(np.count_nonzero(self.labels != IGNORED))


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Documents of each pack: pack p holds `members[bounds[p]:bounds[p + 1]]`, both int64."""

    members: Int64
    bounds: Int64

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.bounds) - 1


def plan_alone(lengths: Int64) -> PackPlan:
    """A pack for each document."""
    return PackPlan(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def plan_in_sequence(lengths: Int64, seq_len: int) -> PackPlan:
    """Packs filled in file order: a document that no longer fits begins the next pack."""
    bounds, used = [0], 0
    for document, length in enumerate(lengths.tolist()):
        if used + length > seq_len:
            bounds.append(document)
            used = 0
        used += length
    return PackPlan(np.arange(len(lengths)), np.array([*bounds, len(lengths)]))


def plan_best_fit(lengths: Int64, seq_len: int) -> PackPlan:
    """Few, full packs: the longest document first, each into the pack that it fills best (best-fit decreasing).

    At most 11/9 of the fewest possible packs, plus 4 (D. S. Johnson, "Near-optimal bin packing algorithms", 1973). The
    best pack is found in one step, from a set of free rooms kept as the bits of an integer.
    """
    packs: list[list[int]] = []
    open_packs: list[list[int]] = [[] for _ in range(seq_len + 1)]  # pack numbers by free room
    rooms = 0  # bit r is set while some pack has room r
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        roomy = rooms >> length
        if roomy:
            room = length + (roomy & -roomy).bit_length() - 1
            number = open_packs[room].pop()
            if not open_packs[room]:
                rooms ^= 1 << room
        else:
            room, number = seq_len, len(packs)
            packs.append([])
        packs[number].append(document)
        left = room - length
        if left:
            open_packs[left].append(number)
            rooms |= 1 << left
    members = np.array([document for pack in packs for document in sorted(pack)])
    return PackPlan(members, np.cumsum([0, *map(len, packs)]))


def epoch_order(packs: int, seed: int, epoch: int) -> Int64:
    """The order of packs in an epoch, a permutation that (packs, seed, epoch) alone determines.

    Sorted by hash (splitmix64), not drawn from numpy's generators, whose streams may change between releases: a run
    resumed under another numpy continues with the same pack.
    """
    key = _mix(_mix(seed & _MASK64) ^ epoch)
    values = np.arange(packs, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(values ^ (values >> np.uint64(31)), kind="stable")


def build_pack(corpus: Corpus, documents: Int64, seq_len: int) -> Pack:
    """Lay documents out in one sequence and pad it."""
    tokens, positions, segments = (np.zeros(seq_len, dtype=np.int32) for _ in range(3))
    labels = np.full(seq_len, IGNORED, dtype=np.int32)
    at = 0
    for segment, document in enumerate(documents.tolist(), start=1):
        start, end = int(corpus.bounds[document]), int(corpus.bounds[document + 1])
        here = slice(at, at + end - start)
        tokens[here] = corpus.tokens[start:end]
        positions[here] = np.arange(end - start)
        segments[here] = segment
        labels[here] = corpus.labels[start:end]
        at = here.stop
    return Pack(tokens, positions, segments, labels)


def _mix(value: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
