"""Serving: requests answered by a trained model, in a plain script, in a run, or over HTTP.

In a script `load` makes a `predictor`, whose model may be cut over several devices; `device` and `request_status` are
how these talk.

Over HTTP (`paceline serve`) there is one process without torch, the `server`: `http_app` says which address answers
what, `open_inference` and `for_people` what bodies mean. What answers is a `served_model`: a `model_pool`, where
`batching` decides who is asked what and who is refused, or several of them, an `ensemble_pool`. Each has
`version_processes`, of versions from a `version_source`, a file or a `followed_container`. Each process is a
`model_process`, seen from inside in `answering`, with tensors in `shared_values`; they are forked from a `template`,
which has run the script (`template_process`, `script_model`, `named_call`).
"""
