"""One model cut by named dims: a layout says which dim lies along which axis of the mesh."""

from paceline.split.layout.cut import LayoutCut

__all__ = ["LayoutCut"]
