"""The same training with other hyperparameters, many times: which are best?

- `space`: what can be typed as a parameter, and the values it may take
- `script_arguments`: how a script is given its values; `script_text`: what is known of it before it is started
- `goal`: the metric, and which way it is better
- `proposals`: the values of trial number n
- `study_journal`: trials as Optuna sees them, for its dashboard and its pruners
- `tune_folder`: where results stay, so that a search that was stopped or killed goes on
- `trial_run`: one run of a trial, started, looked at, started again if it was killed
- `tuner`: who is started when, and on which cores
- `leaderboard`, `table`, `plot`, `top`: what came of it

Every trial is a `paceline run`, started as a user would. Nothing here imports torch, and Optuna is loaded by a search
that begins, not by its flags.
"""
