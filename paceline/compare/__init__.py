"""The same training in several ways, to a target, several times: which is faster, and does it matter for the result?

- `ways`: what can be typed as a strategy, and the flags of `paceline run` behind it
- `seeds`: what is different in the repeats, and the same in all ways
- `measuring`: one run, started, watched, and what came of it
- `folder`: where measurements stay, so that a comparison that was stopped goes on
- `spread`: means, spreads, and whether two ways differ by more than that
- `answers`: the numbers in words
- `table`, `plot`: the numbers to look at

Runs are `paceline run`, started one after the other as a user would, and nothing here imports torch.
"""
