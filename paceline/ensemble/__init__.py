"""Ensembles: several models answer one question, and what they say becomes one answer.

`ensemble` asks its members and answers with those that are in time: members in threads of this process
(`members_here`), or in a process each (`members_between`). `combining` makes one answer of several tensors,
and `stacking` fits its weights. `script_members` gets models and a validation set out of a training script, `judging`
measures the ensemble on it beside each member, and `paired_test` says whether the difference is more than chance.
"""
