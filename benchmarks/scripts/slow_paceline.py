"""One slow replica: paceline run slow_paceline.py --replicas 4 --servers 1 --accept 3 -- --straggler 3"""

import torch
from slow import Log, SlowLoss, make_data, make_model, parse

import paceline as pl


def main() -> None:
    options = parse(__doc__)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = pl.Trainer(model, optimizer, SlowLoss(options, pl.place().rank))
    log = Log(options.times if trainer.replica == 0 else None)
    for batch in trainer.batches(make_data(options), options.batch_size):
        trainer.step(batch)
        log.step(trainer.steps, len(batch[0]))


if __name__ == "__main__":
    main()
