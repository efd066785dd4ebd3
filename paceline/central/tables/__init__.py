"""Sparse embeddings on servers: `tables` holds and updates rows, `embedding` looks them up in a model, `inputs` learns
which part of a batch is looked up, `rows_ahead` asks for the rows of the next batch."""
