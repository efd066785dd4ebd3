"""A trained model in int8: which layers, in what file, by which kernels, and what it costs in quality.

    script ─▶ model, metric, samples ─▶ layers ─▶ ranges of inputs ─▶ which of them ─▶ file ─▶ report
              (`script_quantizer`)     (`layers`) (`ranges`)          (`choosing`)    (`int8_file`)

`rounding` is the arithmetic, `kernels` what torch computes it with, and `int8_linear`, `int8_convolution`,
`int8_attention`, `int8_recurrent` and `int8_embedding` are the modules that stand in the place of the user's; `swaps`
puts them into a model and takes them out again. `timing` measures, `table` and `plot` show, `onnx_export` writes for
others.
"""
