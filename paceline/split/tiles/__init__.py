"""Tiles: activations of a convolutional model cut by rows, and columns, over devices.

User code runs as it is. What it sees of an activation is a `Tile`: a tensor of the whole size that holds this device's
part (`tile`). Every torch function that meets one comes to `tiled_forward`, which knows how it is done on tiles:
`needed_rows` says which rows an op needs, `halo_exchange` fetches them from their devices and takes their gradients
back, and `spatial`, `edge_convolution`, `max_pool`, `resize`, `norms`, `pointwise` and `reductions` are the ops. What
none of them knows is done on the whole, which is gathered for it, on every device alike; the head of a model is just
that. A convolution after that cuts again.

Gradients of what is whole are sums over the devices: each has a summand, and the loss itself counts on the first device
only. So every op between tiles and wholes is the plain adjoint of its forward, and a parameter may be used anywhere, in
the tiles, in the head, in the loss, and its gradient is right.
"""

from paceline.split.tiles.cut import TilesCut

__all__ = ["TilesCut"]
