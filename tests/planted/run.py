"""Plant faults in copies of the tree, one in each, and note which tests find them.

    python tests/planted/run.py NAME ... --out results.jsonl     those faults
    python tests/planted/run.py --all --out results.jsonl        every fault that the file has no result of yet
    python tests/planted/run.py --table results.jsonl            the table of README.md

faults.patch has them: each is a plain unified diff of one line, behind lines that name it, say what a user would
notice, and which tests most likely find it. First those tests run; where they pass, so do the parts of the suite, until
one fails. The tree that this runs from is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATCH = HERE / "faults.patch"
NOT_COPIED = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "dist")
PARTS: dict[str, tuple[str, ...]] = {  # of the suite, the cheapest first; those of `make test`
    "replicas": ("tests/replicas", "tests/bench", "tests/tools"),
    "cluster": ("tests/cluster",),
    "kernels": ("tests/kernels",),
    "rest": (
        "tests",
        *(f"--ignore=tests/{part}" for part in ("system", "replicas", "bench", "tools", "cluster", "kernels")),
    ),
    "system": ("tests/system",),
}
OUTCOMES = {0: "passed", 1: "failed", 5: "passed"}  # by pytest's exit status; 5: it has collected nothing
_FIELD = re.compile(r"^# (fault|notices|tests): (.+)$")


@dataclass(frozen=True, slots=True)
class Fault:
    """One line that is wrong.

    file      from the root of the tree
    old, new  the lines of the hunk as they are, and as they are with the fault
    """

    name: str
    notices: str
    tests: tuple[str, ...]
    diff: str
    file: str
    old: str
    new: str

    def plant(self, root: Path) -> None:
        """Change the file under `root`. Raises ValueError unless the lines are there, and once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its lines are {text.count(self.old)} times in {self.file}")
        (root / self.file).write_text(text.replace(self.old, self.new))


def read_faults(path: Path = PATCH) -> list[Fault]:
    """Return the faults of a patch file, in its order."""
    parts = re.split(r"^(?=# fault: )", path.read_text(), flags=re.MULTILINE)
    return [_fault(part) for part in parts if part.startswith("# fault: ")]


def _fault(text: str) -> Fault:
    lines = text.splitlines(keepends=True)
    head = dict(found.groups() for line in lines[:3] if (found := _FIELD.match(line)))
    diff = lines[3:]
    hunk = diff[3:]
    old, new = ("".join(line[1:] for line in hunk if line[0] in kind) for kind in (" -", " +"))
    file = diff[1].removeprefix("+++ b/").strip()
    return Fault(head["fault"], head["notices"], tuple(head["tests"].split()), "".join(diff), file, old, new)


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that run together. outcome: passed, failed, hung, or broken where they could not be collected."""

    name: str
    outcome: str
    test: str
    seconds: float


def run_fault(fault: Fault, stages: Sequence[tuple[str, Sequence[str]]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a fault: the stages that ran, up to the first that did not pass."""
    ran: list[Stage] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        fault.plant(copy)
        for name, tests in [("named", fault.tests), *stages]:
            ran.append(_run_tests(copy, name, tests, options))
            if ran[-1].outcome != "passed":
                break
        lint = _lint(copy, fault.file) if options.lint else None
    last = ran[-1]
    return {
        "fault": fault.name,
        "found": last.outcome in ("failed", "hung"),
        "broken": last.outcome == "broken",
        "stage": last.name,
        "test": last.test,
        "lint": lint,
        "stages": {stage.name: [stage.outcome, round(stage.seconds, 1)] for stage in ran},
    }


def _run_tests(copy: Path, name: str, tests: Sequence[str], options: argparse.Namespace) -> Stage:
    thorough = ["--thorough"] if options.thorough else []
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--no-header", "--tb=short", *thorough, *tests]
    began = time.monotonic()
    status, output = _ended(command, copy, options.timeout)
    if status is None or status < 0:  # a fault in C may take the process with it
        started = re.findall(r"^(tests/\S+::\S+) *(?:Fatal.*)?$", output, re.MULTILINE)
        outcome = "hung" if status is None else "failed"
        return Stage(name, outcome, started[-1] if started else "", time.monotonic() - began)
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - |$)", output, re.MULTILINE)
    outcome = OUTCOMES.get(status, "failed" if failed else "broken")
    if outcome == "broken":
        print(output[-3000:], file=sys.stderr)
    return Stage(name, outcome, failed[0] if failed else "", time.monotonic() - began)


def _lint(copy: Path, file: str) -> list[str]:
    """Return those of ruff and mypy that complain."""
    tools = {"ruff": ["ruff", "check", "--quiet", file], "mypy": ["mypy", "--strict", "-p", "motley"]}
    if not file.endswith(".py"):
        return []
    return [name for name, tool in tools.items() if _ended([sys.executable, "-m", *tool], copy, 900)[0] != 0]


def _ended(command: Sequence[str], copy: Path, timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output; no status: it took longer. Whatever it has started ends with it."""
    fresh = {
        "PYTHONPATH": f"{copy}/src:{copy}/loadtests",
        "XDG_CACHE_HOME": str(copy.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, cwd=copy, env={**os.environ, **fresh}, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def table(results: Path) -> Iterator[str]:
    """Lines of Markdown: of each fault its latest result."""
    latest = {one["fault"]: one for one in map(json.loads, results.read_text().splitlines())}
    yield "| fault | found by | not found by |"
    yield "|---|---|---|"
    for fault in read_faults():
        one = latest.get(fault.name)
        if one is None:
            yield f"| {fault.name} | not run | |"
            continue
        passed = ", ".join(name for name, (outcome, _) in one["stages"].items() if outcome == "passed")
        found = "`{test}`".format(**one) if one["found"] else "**nothing**"
        yield f"| {fault.name} | {found} | {passed} |"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults")
    parser.add_argument("--all", action="store_true", help="every fault that --out has no result of")
    parser.add_argument("--out", type=Path, help="a file to which a line of JSON is added for each fault")
    parser.add_argument(
        "--table", type=Path, metavar="RESULTS", help="print the table of these results, and run nothing"
    )
    parser.add_argument("--named-only", action="store_true", help="only the tests that a fault names")
    parser.add_argument("--system", action="store_true", help="tests/system too")
    parser.add_argument("--thorough", action="store_true", help="all tests, as `make thorough` has them")
    parser.add_argument("--lint", action="store_true", help="note whether ruff or mypy finds it as well")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the tests of one stage")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        return
    if not options.out or not (options.names or options.all):
        parser.error("give --out, and names of faults or --all")
    known = {fault.name: fault for fault in read_faults()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no fault {unknown[0]}")
    done = (
        {json.loads(line)["fault"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    )
    chosen = [known[name] for name in options.names] or [one for name, one in known.items() if name not in done]
    stages = [] if options.named_only else [item for item in PARTS.items() if options.system or item[0] != "system"]
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as out:
        for result in pool.map(lambda fault: run_fault(fault, stages, options), chosen):
            print(json.dumps(result), file=out, flush=True)
            print(
                f"{result['fault']}: {result['test'] if result['found'] else 'NOT FOUND'} {result['stages']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
