"""The chief of a container: who computes which samples, and which gradients make a step. No clock, socket or tensor.

`chief` decides, in the words of `tickets`; it knows the `members` and an `open_step`, and writes in `open_books`, whose
value are `books`. `closing` makes a step of tickets, `pace` says for how many replicas it should wait, `reservations`
what an async replica gets next, `tasks` what happens between steps.
"""
