"""Starting processes and keeping watch over them.

- `place`: which replica a process is, and what it was given
- `cores`: which cores a replica gets
- `replica`: one replica process, seen from the supervisor and from inside
- `supervisor`: starts the replicas of a host, notices deaths, decides what happens then
- `emulate`: several hosts on one machine, with links of a real speed

Nothing here imports torch, and nothing is imported by this file: `python -m paceline.launch.replica` has to find
its module unused, and has to be light.
"""
