"""Training of the demo model, which ships in replicas/demo: `PYTHONPATH=tools python -m demo_model build`.

It makes the model anew from Python's own documentation; `… verify` checks the shipped one, in the folder that
motley.replicas.demo names.
"""
