"""What a step of a script costs, measured on this machine without training anything.

`values` is what is found, without torch, for whoever plans. `profiler` finds it, in a process that runs the script up
to its first step: `step_times` of a replica's share of the batch, alone and beside busy `neighbours`; the
`optimizer_times` of the user's optimizer; the costs of `layers`; and what a model that is cut would take, by
`virtual_devices`.
"""
