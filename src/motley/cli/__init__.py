"""Command line: one file per command. Heavy imports happen inside commands, so that help is quick."""
