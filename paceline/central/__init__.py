"""Parameters on servers. The rooms: `chief` decides, `messages` is what is said, `container` a server's share, `tables`
sparse embeddings, `durability` what outlives a process, `server` the process, `client` and `replica` the other side;
`shards`, which all of them work out alike, says what lies where."""
