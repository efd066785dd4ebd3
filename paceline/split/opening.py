"""From the value that says how a model is cut to the cut itself."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.exchange.mailboxes import Peers
from paceline.split.cut import Cut
from paceline.split.values import Layout, Split, Stages, Tiles


def open_cut(split: Split, peers: Peers, dims: Mapping[str, str] | None = None) -> Cut:
    """This device's side of the cut; what a way of cutting needs is imported with it. `dims`: names, for a layout."""
    if isinstance(split, Layout):
        from paceline.split.layout import LayoutCut

        return LayoutCut(split, peers, dims or {})
    if isinstance(split, Stages):
        from paceline.split.stages import StagesCut

        return StagesCut(split, peers)
    if isinstance(split, Tiles):
        from paceline.split.tiles import TilesCut

        return TilesCut(split, peers)
    from paceline.split.wavefront import WavefrontCut

    return WavefrontCut(split, peers)
