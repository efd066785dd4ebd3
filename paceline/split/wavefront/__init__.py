"""Stacked recurrent layers, cut by layer and time: layer l works at block t while layer l + 1 works at block t - 1.

    device 0   layers 0, 1   ── block 0 ──▶── block 1 ──▶── block 2 ──▶
                                  ╲             ╲             ╲
    device 1   layers 2, 3         ▶─ block 0 ──▶── block 1 ──▶── block 2 ──▶ the output, block by block to all

Backward is the mirror image: the last device begins with the last block. What is below and above the recurrent module
is computed by all devices alike, so its output and the gradient of its input go to all of them.

`layers` is the arithmetic of one layer at one block, on rows that `time_blocks` counts, with matrices that are packed
once (`packed_matrix`). `wave` is the order in which devices work and what they send, `recurrent_module` how a module's
own forward comes to do that, `cut` who has which layers.
"""

from paceline.split.wavefront.cut import WavefrontCut

__all__ = ["WavefrontCut"]
