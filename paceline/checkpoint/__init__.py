"""Checkpoints: one save of a run on disk, that is either there as a whole or not there at all.

    model.safetensors                               the newest save: the model's own state_dict, for plain
                                                    torch to load; in its metadata the notes and all checksums
    model.step-1200-9f3c01ab.training.safetensors   its training tensors, under a name no other save has
    model.previous.safetensors                      the save before it …
    model.step-1100-07d2e4b8.training.safetensors   … which names its own training file in the same way

`model.safetensors` names its training file, so replacing that one file by a rename commits both at once: a
process that is killed at any moment leaves the old save or the new one. Every byte that counts is under a
checksum, so a file that is cut short, altered or of another save is refused with its name and the reason.

A model alone, without training (`write_model`), is one such file by itself.

Nothing here knows what is saved: `loop/training_loop.py` puts it together, tensors and a `RunState` as notes.
"""

from paceline.checkpoint.saves import Checkpoint, read, read_model, read_noted_model, write, write_model

__all__ = ["Checkpoint", "read", "read_model", "read_noted_model", "write", "write_model"]
