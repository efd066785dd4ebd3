"""Exchange: how the processes of a run agree, and how bytes travel between them.

`board` holds the shared `words` of a host and `together` what replicas do by them; `sums` adds up small things through
shared memory, `mailboxes` carries tensors between the devices of one replica, `links` sums between hosts, coded by a
`wire`. Nothing here knows of strategies.
"""

WIRES = ("fp32", "bf16", "fp16", "int8")  # how gradients can look on a link; without torch, for the command line
