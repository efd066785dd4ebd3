"""Starting processes and keeping watch over them.

- `job`: what is to be started, and what came of it
- `cores`: which cores a replica gets
- `replica`: one replica process, seen from the supervisor and from inside; `replica_output`: what replicas print, and
  who of them is shown
- `servers`: those of a run on this host, started and started again; `server_process`: one of them
- `starter`: a process that has torch, of which they are forked; `starter_process`: the same from inside
- `with_parent`: a process that ends when its parent does
- `guard`: ends what replicas have spawned and left behind, also if the supervisor was killed
- `limits`: what the shell allows a process, where that is behind an error
- `supervisor`: starts the replicas of a host, notices deaths, decides what happens then
- `restarts` counts deaths, `regular_look` follows progress and stalls, `reporter` says what there is to say
- `meeting`: where the supervisors of several hosts meet; `meeting_door`: who gets there; `host_messages` and
  `host_greeting`: what they say, and who is let in; `host_rule`: who goes on when a host is gone
- `hosts`: the supervisors of several emulated hosts, started and ended together
- `emulate`: several hosts on one machine, with links of a real speed

Nothing here imports torch but the starter, by its name, and nothing is imported by this file:
`python -m paceline.launch.replica` has to find its module unused, and has to be light.
"""
