"""One server's share of a container: `container` holds parameters and gradients, `step_maker` updates them. Its chief's
server adds the `runs` that train it, each a `training` (`chief_state`, `presence`); `closing` makes their steps, one
after another; `bounds` refuses what makes no sense."""
