"""Serving: requests answered by a trained model, in a plain script, in a run, or over HTTP.

In a script `load` makes a `predictor`, whose model may be cut over several devices; `device` and `request_status` are
how these talk.

Over HTTP (`paceline serve`) there is one process without torch, the `server`: `http_app` says which address answers
what, `open_inference` and `for_people` what bodies mean, `batching` who is asked what and who is refused, `model_pool`
which processes there are. Each of them is a `model_process`, seen from inside in `answering`, with tensors in
`shared_values`; they are forked from a `template`, which has run the script (`template_process`, `script_model`,
`named_call`).
"""
