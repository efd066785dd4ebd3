"""Paceline: paceline run benchmarks/scripts/images_paceline.py --tiles 2"""

import torch
from images import Batch, Memory, loss, make_data, make_model, parse
from stopwatch import Stopwatch
from torch import nn

import paceline as pl


def main() -> None:
    options = parse(__doc__)
    model = make_model(options)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss)
    data = make_data(options)
    watch, memory = Stopwatch(options.times if trainer.chief else None), Memory(options.memory)

    def metric(model: nn.Module, batch: Batch) -> float:
        value = float(loss(model, batch))
        watch.step()
        return value

    if options.forward:
        trainer.evaluate(data, metric, batch_size=options.batch_size)
    else:
        for batch in trainer.batches(data, options.batch_size):
            trainer.step(batch)
            watch.step()
    memory.write()


if __name__ == "__main__":
    main()
