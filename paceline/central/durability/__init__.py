"""What a killed server comes back from: a snapshot and the records after it, in files (`log_journal`) or on the next
server (`peer_journal`, kept there by `backup`); `snapshot` is what both hold, `recovery` how a server goes on from
it."""
