"""Pinned memory whose rows go to and from a GPU in each of the ways, by the way's name."""

from __future__ import annotations

from speedswap import Pinned

PINNED = {
    "auto": Pinned(),
    "zero_copy": Pinned("zero_copy"),
    "staged out": Pinned("zero_copy", scatter_share=0.0),
    "split out": Pinned("zero_copy", scatter_share=0.5),
    "staged": Pinned("staged"),
    "split": Pinned(gather_share=0.5, scatter_share=0.5),
}
