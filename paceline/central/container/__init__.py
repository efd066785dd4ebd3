"""One server's share of a container: `container` holds parameters and gradients, `step_maker` updates them; `training`
is what its chief's server adds (`chief_state`, `presence`, `closing`); `bounds` refuses what makes no sense."""
