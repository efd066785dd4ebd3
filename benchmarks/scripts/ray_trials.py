"""Trials by Ray Tune, two at a time, each of which starts the script, as for Optuna. In the environment of that peer:

ray_trials.py PYTHON SCRIPT EPOCHS RATES WIDTHS
"""

import subprocess
import sys
from pathlib import Path

import ray
from ray import tune

python, script, epochs = sys.argv[1:4]
rates, widths = ([float(value) for value in given.split(",")] for given in sys.argv[4:6])


def objective(config: dict[str, float]) -> dict[str, float]:
    flags = ["--epochs", epochs, "--lr", str(config["lr"]), "--width", str(int(config["width"]))]
    done = subprocess.run([python, script, *flags], capture_output=True, text=True, check=True)
    return {"accuracy": float(done.stdout.split()[1])}


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
tuner = tune.Tuner(
    tune.with_resources(objective, {"cpu": 1}),
    param_space={"lr": tune.grid_search(rates), "width": tune.grid_search(widths)},
    tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
    run_config=tune.RunConfig(storage_path=str(Path.cwd()), verbose=0),
)
found = tuner.fit()
ray.shutdown()
if found.errors or len(found) != len(rates) * len(widths):
    sys.exit(f"{len(found)} trials, errors: {found.errors}")
