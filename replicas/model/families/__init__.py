"""Model families: one file for each, which reads its config.json into the one decoder's configuration.

May import model_config, checkpoint.files and errors. A new family is a new file and one line in registry.py.
"""
