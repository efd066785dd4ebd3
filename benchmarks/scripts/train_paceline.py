"""Paceline: paceline run benchmarks/scripts/train_paceline.py --replicas 2"""

from stopwatch import Stopwatch
from workload import loss, make_data, make_model, make_optimizer, parse

import paceline as pl


def main() -> None:
    options = parse(__doc__).parse_args()
    model = make_model(options)
    trainer = pl.Trainer(model, make_optimizer(options, model), loss)
    data = make_data(options, trainer.replicas)
    watch = Stopwatch(options.times if trainer.chief else None)
    for batch in trainer.batches(data, options.batch_size * trainer.replicas, epochs=options.epochs):
        trainer.step(batch)
        watch.step()


if __name__ == "__main__":
    main()
