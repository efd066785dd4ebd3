"""A few rows of a large table: paceline run benchmarks/scripts/rows_paceline.py --replicas 2 --servers 1"""

import torch
from rows import Log, Model, batch_size, loss, make_data, parse

import paceline as pl


def main() -> None:
    options = parse(__doc__).parse_args()
    model = Model(options.rows, sparse=True)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    log = Log(options.times if trainer.replica == 0 else None)
    for ids in trainer.batches(make_data(options), batch_size(options), shuffle=False):
        trainer.step(ids)
        log.step()


if __name__ == "__main__":
    main()
