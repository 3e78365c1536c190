"""Lets the paths of modules that docs and settings of nodes have named go on importing after the modules have moved.

Each import by such a path warns with a DeprecationWarning, and gives the module itself and not a copy. A path that docs
name, and whose module moves, is a row of `FORMER_PATHS`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

__all__ = ["FORMER_PATHS", "install"]

FORMER_PATHS: Mapping[str, str] = {
    "motley.cluster.edge.hook": "motley.cluster.security.edge.serve_patches",  # nodes of a cluster are started with it
    "motley.cluster.spare.preloaded": "motley.cluster.service.warm_workers.preloaded",
    "motley.replicas.bench.gpu": "motley_bench.gpu.gpu_session",  # of the distribution motley-bench
}
_FOLDERS = frozenset(path.rpartition(".")[0] for path in FORMER_PATHS)


class FormerPathFinder(MetaPathFinder, Loader):
    """Finds modules by their former paths. It is asked last, when nothing else has been found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in FORMER_PATHS:
            return ModuleSpec(fullname, self)
        return ModuleSpec(fullname, self, is_package=True) if fullname in _FOLDERS else None

    def get_code(self, fullname: str) -> CodeType:
        """Return a program for `python -m FORMER_PATH`, which runs the module under its path of today."""
        told = f"{fullname} is now {FORMER_PATHS[fullname]}; run that"
        run = f"runpy.run_module({FORMER_PATHS[fullname]!r}, run_name='__main__', alter_sys=True)"
        return compile(f"import runpy, warnings\nwarnings.warn({told!r}, DeprecationWarning)\n{run}", fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name not in FORMER_PATHS:
            return  # a folder that is there for the modules in it alone
        warnings.warn(f"{name} is now {FORMER_PATHS[name]}; import that", DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(FORMER_PATHS[name])


def install() -> None:
    """Make the former paths import, in this process. Calling it again changes nothing."""
    if not any(isinstance(finder, FormerPathFinder) for finder in sys.meta_path):
        sys.meta_path.append(FormerPathFinder())
