"""Memory: parameters, gradients and optimizer state as flat buffers that lie once per host.

`layout` decides where every tensor lies and how the bytes are cut into chunks and shards (pure arithmetic);
`arena` is a shared segment; `model_arena` is the arena of one model: the regions, and typed views of them.
Nothing here knows of strategies.
"""

from paceline.memory.arena import Arena
from paceline.memory.layout import Chunk, Layout, Piece, Slot, assign
from paceline.memory.model_arena import ModelArena

__all__ = ["Arena", "Chunk", "Layout", "ModelArena", "Piece", "Slot", "assign"]
