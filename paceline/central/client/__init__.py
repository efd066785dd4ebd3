"""One replica's side of the servers: `client` takes its place, `chief_client` its work, `pulling` and `pushing` move
parameters and gradients (`server_view`: one server, as seen from here; `arrival`: gradients that are complete),
`initial_values` fills a new container, `whole_tensors` and `reader` read what servers hold."""
