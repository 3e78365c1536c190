"""Benchmark of everything on a GPU in one command, in parts with a share of the time each.

`python -m motley_bench.gpu --out DIR` is `motley bench gpu` without the command line. It needs torch, Triton,
transformers, safetensors and numpy, and nothing else of what Motley depends on. A new part is a module here and a stage
in `gpu_session.STAGES`.
"""
