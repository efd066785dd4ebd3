"""Stacked recurrent layers, cut by layer and time: layer l works at block t while layer l + 1 works at block t - 1.

    device 0   layers 0, 1   ── block 0 ──▶── block 1 ──▶── block 2 ──▶
                                  ╲             ╲             ╲
    device 1   layers 2, 3         ▶─ block 0 ──▶── block 1 ──▶── block 2 ──▶ the output, block by block to all

Backward is the mirror image: the last device begins with the last block. There are two ways, and `cut` chooses.

Modules of several layers (nn.LSTM, nn.GRU, nn.RNN): what is below and above the module is computed by all devices
alike, so its output and the gradient of its input go to all of them. `layers` is the arithmetic of one layer at one
block, on rows that `time_blocks` counts, with matrices that are packed once (`packed_matrix`). `wave` is the order in
which devices work and what they send, `recurrent_module` how a module's own forward comes to do that,
`stacked_modules` who has which layers.

Cells in a loop of the user's: `cells` finds them in the graph of the loss, as what repeats in time (`dependencies`: and
comes from what), `placement` gives every operator a device and a block, which make a task of split/tasks.py,
`random_order` has them draw as one process draws, and `cells_cut` is all of it together.
"""

from paceline.split.wavefront.cut import WavefrontCut

__all__ = ["WavefrontCut"]
