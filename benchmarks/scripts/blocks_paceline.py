"""A transformer with Paceline: paceline run benchmarks/scripts/blocks_paceline.py --stages 2 --micro-batches 8"""

from blocks import Transformer, loss, make_data, make_optimizer, parse
from peak import peak
from stopwatch import Stopwatch

import paceline as pl
from paceline.run_place import find_place


def main() -> None:
    options = parse(__doc__)
    with peak(options.memory, find_place().rank):
        model = Transformer(options)
        trainer = pl.Trainer(model, make_optimizer(model), loss)
        watch = Stopwatch(options.times if trainer.chief else None)
        for batch in trainer.batches(make_data(options), options.batch_size):
            trainer.step(batch)
            watch.step()


if __name__ == "__main__":
    main()
