"""Exchange: how the processes of a run agree, and how bytes travel between them.

`board` holds the shared `words` of a host, `members` says who takes part in a try, and `together` what replicas do by
them; `sums` adds up small things through
shared memory, `mailboxes` carries tensors between the devices of one replica. `links` are connections between hosts;
what is sent over them is coded by a `wire` (`wire_names`, `wire_format`, `top_values`), which owes what it loses
(`feedback`), and is added up (`host_sums`, by the rounds of `coded_sums` and `low_rank`). Nothing here knows of
strategies.
"""
