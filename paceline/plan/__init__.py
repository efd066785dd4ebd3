"""Which way of distributing pays, and where it stops paying: costs, predictions, and a simulator. No torch at import.

One description of a strategy's step (`step`; made by `mirrored_step`, `servers_step` and `cut_step`) is what the
simulator runs (`simulate`, on links of `fair_links`, with `compute_times` drawn at random) and what explanations
name.

What a plan is made of: a script's profile (`kept_profiles`, or a `trace`), a machine's `calibration` (`calibrate`, by
runs of `calibration_script` and `machine_script`, `calibrate_tls`), a `cluster`, maybe of described `devices`.
`predict` adds up what was measured (`share_compute`, `exchange_costs`, `memory_use`; `far_servers` are simulated) to
a `prediction` for each of the `candidates`; `saturation` and `reasons` say where it ends and why; `report` has all of
it, `shown` and `plot` show it, `checking` runs it, and `after_run` learns from runs.
"""
