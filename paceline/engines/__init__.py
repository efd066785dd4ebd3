"""Runs on the nodes of somebody else's cluster: an engine starts one agent a host, and the rest is Paceline's own.

- `messages`: what the driver, here, and the agents, there, say to each other, a line each
- `agent`: runs on a host: has one `paceline run` of its own, passes on what it prints, and ends it when it is told to
- `driver`: runs where the user is: starts all hosts when all agents are there, shows what they print, ends them
- `line_reader`: whole lines out of a stream
- `on_ray`, `on_slurm`: how agents are started there, and how lines get to them and back
- `on_kubernetes`: manifests, that somebody applies later
- `setting`: what was asked of an engine

All hosts have the flags that the driver was given, as on machines that somebody goes to one by one. So whatever works
on several hosts works here, and inside a host nothing knows of engines. Nothing here imports torch.
"""
