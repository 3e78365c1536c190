"""Command line of the demo model: ``python -m demo_model build [--out DIR]`` and ``... verify [--model DIR]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from motley.replicas.demo import demo_path


def main() -> int:
    """Run one subcommand of the demo model's command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="train, quantize, compare with the shipped model")
    build.add_argument("--out", type=Path, default=Path("demo-model"), help="default: demo-model")
    verify = commands.add_parser("verify", help="check digests and held-out loss")
    verify.add_argument("--model", type=Path, default=demo_path(), help="default: the shipped one")
    arguments = parser.parse_args()
    # Imported only now: torch and transformers take seconds to import, and --help should not.
    if arguments.command == "build":
        from .demo_build import run_build

        return run_build(arguments.out)
    from .demo_verification import run_verify

    return run_verify(arguments.model)


if __name__ == "__main__":
    raise SystemExit(main())
