"""The chief of a container: who computes which samples, and which gradients make a step. No clock, socket or tensor.

`chief` decides, in the words of `tickets`; `pace` says for how many replicas it should wait, `reservations` what an
async replica gets next, `tasks` what happens between steps.
"""
