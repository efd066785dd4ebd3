"""One model cut by named dims: a layout says which dim lies along which axis of the mesh.

atoms        what dims are made of, and which are the same
graph_dims   the dims of everything in one graph, joined by `rules`, one a kind of operator
model_dims   the dims of all parameters, from one or more graphs, and their `names`
axes         which part of a dim this device has
rewrite      the graph that this device runs, with operators `on_parts`
cut          all of it together; `show` is what `paceline dims` tells
"""

from paceline.split.layout.cut import LayoutCut

__all__ = ["LayoutCut"]
