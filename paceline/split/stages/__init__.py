"""By layer: every device has some of a model's layers, and micro-batches go from one device to the next.

    device 0   F0 F1    B0 F2 B1 F3 B2    B3          F: forward of a micro-batch
    device 1      F0 B0 F1 B1 F2 B2 F3 B3             B: its backward

The graph of the loss is a list of operators, and a stage is one task of it (split/tasks.py).

measure         what each operator costs, and where the list must not be cut
divide          where it is cut
micro_batches   a batch in micro-batches
cut             all of it together, in the order of split/stage_schedule.py
"""

from paceline.split.stages.cut import StagesCut

__all__ = ["StagesCut"]
