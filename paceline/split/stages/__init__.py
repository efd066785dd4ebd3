"""By layer: every device has some of a model's layers, and micro-batches go from one device to the next.

    device 0   F0 F1    B0 F2 B1 F3 B2    B3          F: forward of a micro-batch
    device 1      F0 B0 F1 B1 F2 B2 F3 B3             B: its backward

A model's forward is a list of operations (`split/trace.py`).

measure         what each of them costs, and where the list must not be cut
divide          where it is cut
stage_module    what one device runs of it, and what it gets from and gives to others
micro_batches   a batch in micro-batches
schedule        in which order they are computed
cut             all of it together
"""

from paceline.split.stages.cut import StagesCut

__all__ = ["StagesCut"]
