"""Paceline: paceline run benchmarks/scripts/wide_paceline.py --mesh model=2 --layout hidden=model"""

from stopwatch import Stopwatch
from wide import DIMS, loss, make_data, make_model, make_optimizer, parse

import paceline as pl


def main() -> None:
    options = parse(__doc__).parse_args()
    model = make_model(options)
    trainer = pl.Trainer(model, make_optimizer(model), loss, dims=DIMS)
    data = make_data(options)
    watch = Stopwatch(options.times if trainer.chief else None)
    if options.forward:
        predictor = trainer.predictor()
        for x in data[0].split(options.batch_size):
            predictor(x)
            watch.step()
        return
    for batch in trainer.batches(data, options.batch_size):
        trainer.step(batch)
        watch.step()


if __name__ == "__main__":
    main()
